"""Checkpoint folders: names, listing, rotation, and handling of superseded and incomplete ones.

step-00000200              complete; without a manifest: incomplete, skipped, never overwritten
superseded-step-00000300   complete, but from a branch that a later `--resume PATH` abandoned
incomplete-step-00000300   had no manifest when a save needed its name
.step-00000200.*.tmp       a save in progress, or left by a killed one
.step-00000200.*.old       being removed
best.json                  names the checkpoint with the lowest held-out loss (train.keep_best)
"""

import contextlib
import json
import logging
import re
import shutil
import uuid
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from boost.config import Config
from boost.errors import CheckpointError, StorageError
from boost.parallel.mesh import Mesh
from boost.paths import read_text
from boost.train.checkpoint.agreement import run_on_main
from boost.train.rundir import BEST

log = logging.getLogger("boost")

BEST_FILE = "best.json"
MANIFEST_FILE, STATE_FILE, TOKENIZER_FILE, TENSORS = "manifest.json", "state.json", "tokenizer.json", "tensors"
_NAME = re.compile(r"step-(\d{8,10})")
_LEFTOVER = re.compile(r"\.step-.*\.(tmp|old)")


def checkpoint_path(folder: Path, step: int) -> Path:
    """Path of the complete checkpoint of `step`."""
    return folder / f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """The step in a folder's name, including superseded and incomplete ones; None for any other name."""
    name = path.name.removeprefix("superseded-").removeprefix("incomplete-").partition(".")[0]
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def step_folders(folder: Path) -> list[Path]:
    """Step folders, complete or not, oldest first."""
    if not folder.is_dir():
        return []
    steps = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(steps, key=lambda path: int(path.name.removeprefix("step-")))


def complete_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints in a folder, oldest first."""
    return [path for path in step_folders(folder) if (path / MANIFEST_FILE).is_file()]


def find_checkpoint(path: Path) -> Path:
    """Resolves a path to a checkpoint: a checkpoint itself, or the newest one in a run directory or checkpoints folder. A path that
    ends in `@best` selects the one with the lowest held-out loss.

    Raises CheckpointError if there is none.
    """
    if path.name.endswith(BEST) and not path.exists():
        run = Path(str(path).removesuffix(BEST))
        for folder in (run / "checkpoints", run):
            if best := read_best(folder):
                return checkpoint_path(folder, best.step)
        raise CheckpointError(
            f"'{run}{BEST}': no best checkpoint is recorded, because train.keep_best was false or no evaluation has run yet; "
            f"use '{find_checkpoint(run)}', the newest"
        )
    if (path / STATE_FILE).is_file() or (path / MANIFEST_FILE).is_file():
        return path
    for folder in (path / "checkpoints", path):
        if complete := complete_checkpoints(folder):
            return complete[-1]
    if not path.exists():
        raise CheckpointError(f"no checkpoint at '{path}': no such folder")
    raise CheckpointError(f"no complete checkpoint in '{path}'; pass a run directory or a step-... folder")


def fallback_folder(config: Config) -> Path | None:
    """Folder for the last checkpoint of a run if run.dir is not writable: `run.fallback_dir` followed by the absolute path of
    run.dir, so that several runs can share it. None if not configured."""
    if not config.run.fallback_dir:
        return None
    run = Path(config.run.dir).absolute()
    return Path(config.run.fallback_dir, *run.parts[1:], "checkpoints")


def make_temporary(folder: Path, step: int) -> tuple[Path, list[str]]:
    """Creates an empty folder to write the checkpoint of `step` to. Returns it, and warnings. Removes leftovers of killed saves.

    The name is unique, so a leftover that cannot be removed (an NFS `.nfs*` file, an immutable file) does not block the save.
    """
    folder.mkdir(parents=True, exist_ok=True)
    warnings = []
    for leftover in sorted(path for path in folder.iterdir() if _LEFTOVER.fullmatch(path.name)):
        if problem := remove(leftover):
            warnings.append(f"'{leftover}', left by an earlier save, cannot be removed: {problem}; remove it manually")
    temporary = folder / f".step-{step:08d}.{uuid.uuid4().hex[:8]}.tmp"
    (temporary / TENSORS).mkdir(parents=True)
    return temporary, warnings


def make_room(final: Path) -> tuple[Path | None, list[str]]:
    """Renames an existing folder at the path of a new checkpoint. Returns the folder to remove after the save, and warnings.

    Only an earlier checkpoint of the same step, or an empty folder, is removed.
    """
    if not final.exists():
        return None, []
    if final.is_dir() and ((final / MANIFEST_FILE).is_file() or not any(final.iterdir())):
        return final.rename(final.with_name(f".{final.name}.{uuid.uuid4().hex[:8]}.old")), []
    aside = final.rename(_unused(final.with_name(f"incomplete-{final.name}")))
    return None, [f"'{final}' had no {MANIFEST_FILE}, so it was renamed to '{aside.name}' instead of overwritten"]


def remove(path: Path) -> str | None:
    """Removes as much of a folder as possible. Returns the first error if anything remains."""
    problems: list[str] = []

    def record(_: Any, failed: str, error: Any) -> None:
        if not isinstance(error[1], FileNotFoundError):
            problems.append(f"{error[1].strerror or error[1]} ({Path(failed).name})")

    # Replaced by `onexc` in Python 3.12.
    shutil.rmtree(path, onerror=record)
    return problems[0] if problems else None


def rotate(folder: Path, keep: int, keep_every: int, protected: Collection[int], mesh: Mesh) -> None:
    """Removes the complete checkpoints that `rotated` returns. Raises StorageError on every process."""

    def remove_oldest() -> None:
        for path in rotated(complete_checkpoints(folder), keep, keep_every, protected):
            # Renamed first, so that a folder with a checkpoint's name is always complete.
            removed = path.rename(path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.old"))
            if problem := remove(removed):
                log.warning("'%s' cannot be removed entirely: %s", removed, problem)

    run_on_main(mesh, remove_oldest, StorageError)


def rotated(complete: Sequence[Path], keep: int, keep_every: int, protected: Collection[int]) -> list[Path]:
    """All checkpoints except the newest `keep` unmarked ones, those of every `keep_every` steps (0: none), and those of the
    `protected` steps. `complete`: oldest first.

    If the newest one is marked (`marks_of`), training is in trouble, and any unmarked one may be the last good one. Then only
    marked ones are removed, except the newest of either kind.
    """
    marks = {path: marks_of(path) for path in complete}
    unmarked = [path for path in complete if not any(marks[path])]
    newest = set(unmarked[-keep:])
    if complete and complete[-1] not in newest:
        ruined, doubtful = ([path for path in complete if marks[path][kind]] for kind in range(2))
        newest = {*unmarked, *ruined[-1:], *doubtful[-1:]}
    return [
        path
        for path in complete
        if path not in newest
        and (step := step_of(path)) not in protected
        and not (keep_every and (step or 0) % keep_every == 0)
    ]


def marks_of(path: Path) -> tuple[str, str]:
    """(trouble, doubt) of a checkpoint, see `Position`, as recorded in it; empty if there is none, or if it cannot be read."""
    try:
        state = json.loads(read_text(path / STATE_FILE))
        return str(state.get("trouble", "")), str(state.get("doubt", ""))
    except (OSError, ValueError, AttributeError, RecursionError):
        return "", ""


@dataclass(frozen=True)
class BestCheckpoint:
    """The checkpoint with the lowest held-out loss, as recorded in best.json."""

    step: int
    heldout_loss: float
    """Nats per token."""


def read_best(folder: Path) -> BestCheckpoint | None:
    """The best checkpoint of a run; None if none is recorded, or if it was deleted."""
    try:
        values = json.loads(read_text(folder / BEST_FILE))
        best = BestCheckpoint(int(values["step"]), float(values["heldout_loss"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return best if (checkpoint_path(folder, best.step) / MANIFEST_FILE).is_file() else None


def write_best(folder: Path, best: BestCheckpoint, mesh: Mesh) -> None:
    """Records the best checkpoint, atomically. Raises StorageError on every process."""

    def write() -> None:
        draft = folder / f".{BEST_FILE}.tmp"
        draft.write_text(json.dumps(asdict(best)) + "\n", encoding="utf-8")
        draft.replace(folder / BEST_FILE)

    run_on_main(mesh, write, StorageError)


def supersede(folder: Path, step: int, mesh: Mesh) -> None:
    """Renames checkpoints after `step` to `superseded-step-...`. Training branches off at `step`, and the newest checkpoint must
    belong to the new branch. Raises StorageError on every process."""

    def set_aside() -> None:
        for path in complete_checkpoints(folder):
            if (step_of(path) or 0) > step:
                path.rename(_unused(path.with_name(f"superseded-{path.name}")))

    run_on_main(mesh, set_aside, StorageError)


def _unused(path: Path) -> Path:
    """An unused path: `path`, with .2, .3, ... appended if necessary."""
    candidate, number = path, 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}.{number}")
    return candidate


def incomplete_warnings(folder: Path) -> list[str]:
    """Warnings about step folders without a manifest that are newer than every complete checkpoint. Saves never leave such folders;
    the manifest was removed later."""
    warnings: list[str] = []
    with contextlib.suppress(OSError):
        for path in reversed(step_folders(folder)):
            if (path / MANIFEST_FILE).is_file():
                break
            warnings.insert(0, f"'{path}' has no {MANIFEST_FILE}, so it is incomplete and was skipped")
    return warnings
