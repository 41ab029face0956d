"""Commits a folder as a checkpoint, and then removes or renames earlier checkpoints. Used only on the main process.

1. `make_temporary`: the main process creates `.step-00000200.*.tmp` and removes leftovers from killed saves.
2. Every process writes its files there (write.py). If one process fails, all of them raise an error (`run_on_all`).
3. `publish`: the main process adds manifest.json, syncs, and renames the folder. The checkpoint exists only after this step.
4. Then `rotate` removes earlier checkpoints or, after a return to an earlier step, `supersede` sets them aside.

step-00000200              complete; without a manifest: incomplete, skipped, never overwritten
superseded-step-00000300   complete, but on a branch that `--resume PATH` abandoned, or replaced by a later save at the same step
incomplete-step-00000300   had no manifest when a save needed its name
.step-00000200.*.tmp       a save in progress, or left by a killed save
.step-00000200.*.old       being removed
best.json                  names the checkpoint with the lowest held-out loss (train.keep_best)
"""

import errno
import itertools
import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat
from xxhash import xxh3_128

from boost.paths import is_file, is_folder, read_record, read_record_as, status
from boost.train.rundir import replace_json

log = logging.getLogger("boost")

MANIFEST_FILE, STATE_FILE, TOKENIZER_FILE, TENSORS = "manifest.json", "state.json", "tokenizer.json", "tensors"
BEST_FILE = "best.json"
CHUNK_BYTES = 1 << 20
"""Bytes of a file that are hashed at a time, while they are in the core's cache."""
_NAME = re.compile(r"step-(\d{8,10})")
_LEFTOVER = re.compile(r"\.step-.*\.(tmp|old)")


# Names.


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """The step in a folder's name, including superseded and incomplete ones; None for any other name."""
    name = path.name.removeprefix("superseded-").removeprefix("incomplete-").partition(".")[0]
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def step_folders(folder: Path) -> list[Path]:
    """Step folders, complete or not, oldest first. Raises OSError."""
    if not is_folder(folder):
        return []
    steps = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and is_folder(path)]
    return sorted(steps, key=lambda path: int(path.name.removeprefix("step-")))


def complete_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints in a folder, oldest first. Raises OSError."""
    return [path for path in step_folders(folder) if is_file(path / MANIFEST_FILE)]


def _unused(path: Path) -> Path:
    """An unused path: `path`, with .2, .3, ... appended if necessary."""
    numbered = (path.with_name(f"{path.name}.{number}") for number in itertools.count(2))
    return next(candidate for candidate in itertools.chain([path], numbered) if not status(candidate))


# The temporary folder.


def make_temporary(folder: Path, step: int) -> tuple[Path, list[str]]:
    """Creates an empty folder for the checkpoint at `step`. Returns the folder and warnings. Removes leftovers from killed saves.

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


def remove(path: Path) -> str | None:
    """Removes as much of a folder as possible. Returns the first error if anything remains."""
    problems: list[str] = []

    def record(_: object, failed: str, error: tuple[type[BaseException], BaseException, object]) -> None:
        if not isinstance(error[1], FileNotFoundError):
            problems.append(f"{getattr(error[1], 'strerror', None) or error[1]} ({Path(failed).name})")

    # Python 3.12 replaces `onerror` with `onexc`.
    shutil.rmtree(path, onerror=record)
    return problems[0] if problems else None


# The manifest, and the rename that makes the checkpoint complete.


class FileEntry(BaseModel):
    """Manifest entry for one file."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    bytes: Annotated[int, Field(ge=0)]
    xxh3_128: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    """XXH3's 128-bit digest of the file, as `xxh128sum` prints it. It finds damage, not forgery: whoever can change a file can
    change the manifest. One core computes it faster than memory is copied."""


def entry_of(file: Path) -> FileEntry:
    """Computes the manifest entry for a file on disk."""
    digest, size, buffer = xxh3_128(), 0, memoryview(bytearray(CHUNK_BYTES))
    with file.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            digest.update(buffer[:count])
            size += count
    return FileEntry(bytes=size, xxh3_128=digest.hexdigest())


def write_synced(file: Path, content: bytes) -> FileEntry:
    """Writes a new file, syncs it to disk, and returns its manifest entry."""
    with file.open("xb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    return FileEntry(bytes=len(content), xxh3_128=xxh3_128(content).hexdigest())


def sync(path: Path) -> None:
    """Syncs a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(temporary: Path, final: Path, entries: Mapping[str, FileEntry]) -> list[str]:
    """Adds the manifest (`entries`, by path relative to the checkpoint, with forward slashes) and renames the folder, which makes
    the checkpoint complete. Returns warnings.

    Removes only an earlier checkpoint or an empty folder at the final path, and only after the rename. Until then, that folder
    has a name that no save removes, because a process killed between the two renames leaves nothing at the final path.
    """
    assert STATE_FILE in entries
    manifest = {name: entry.model_dump() for name, entry in entries.items()}
    write_synced(temporary / MANIFEST_FILE, json.dumps(manifest, indent=2, sort_keys=True).encode())
    sync(temporary / TENSORS)
    sync(temporary)
    aside, replaced, warnings = None, False, list[str]()
    if status(final):
        replaced = is_folder(final) and (is_file(final / MANIFEST_FILE) or not any(final.iterdir()))
        aside = final.rename(_unused(final.with_name(f"{'superseded' if replaced else 'incomplete'}-{final.name}")))
    try:
        temporary.rename(final)
    except OSError:
        if aside:
            aside.rename(final)
        raise
    sync(final.parent)
    if not is_file(final / MANIFEST_FILE):  # the run directory was renamed or deleted meanwhile
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(final))
    if aside and not replaced:
        warnings.append(f"'{final}' had no {MANIFEST_FILE}, so it was renamed to '{aside.name}' instead of overwritten")
    elif aside:
        old = aside.rename(final.with_name(f".{final.name}.{uuid.uuid4().hex[:8]}.old"))
        if problem := remove(old):
            warnings.append(f"'{old}' cannot be removed entirely: {problem}")
    return warnings


# Earlier checkpoints.


@dataclass(frozen=True)
class BestCheckpoint:
    """The checkpoint with the lowest held-out loss, as recorded in best.json."""

    step: Annotated[int, Field(ge=0, lt=10**10)]
    heldout_loss: FiniteFloat
    """Nats per token."""


def write_best(folder: Path, best: BestCheckpoint) -> None:
    replace_json(folder / BEST_FILE, asdict(best))


def read_best(folder: Path) -> BestCheckpoint | None:
    """A run's best checkpoint; None if none is recorded, or if it was deleted. Raises OSError."""
    best = read_record_as(folder / BEST_FILE, BestCheckpoint)
    return best if best and is_file(checkpoint_path(folder, best.step) / MANIFEST_FILE) else None


def rotate(folder: Path, keep: int, keep_every: int, protected: Collection[int]) -> None:
    """Removes the complete checkpoints that `rotated` returns."""
    for path in rotated(complete_checkpoints(folder), keep, keep_every, protected):
        # Rename it first, so that a folder with a checkpoint's name is always complete.
        removed = path.rename(path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.old"))
        if problem := remove(removed):
            log.warning("'%s' cannot be removed entirely: %s", removed, problem)


def rotated(complete: Sequence[Path], keep: int, keep_every: int, protected: Collection[int]) -> list[Path]:
    """All checkpoints except the newest `keep` unmarked ones, one per `keep_every` steps (0: none), and those at
    `protected` steps. `complete`: oldest first.

    If the newest checkpoint is marked (`marks_of`), the run has a problem, and any unmarked one may be the last good
    one. In that case, only marked ones are removed, except the newest of each kind.
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
    """(trouble, doubt) in a checkpoint's state (see `Position`); empty strings if there is none. Raises OSError if it cannot be
    read: such a checkpoint must not pass for a good one whose rotation removes others."""
    state = read_record(path / STATE_FILE)
    return str(state.get("trouble", "")), str(state.get("doubt", ""))


def supersede(folder: Path, step: int) -> None:
    """Renames checkpoints after `step` to `superseded-step-...`, because training branches off at `step`, and the
    newest checkpoint must belong to the new branch."""
    for path in complete_checkpoints(folder):
        if (step_of(path) or 0) > step:
            path.rename(_unused(path.with_name(f"superseded-{path.name}")))
