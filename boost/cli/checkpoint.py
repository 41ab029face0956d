"""`boost checkpoint`: lists and verifies the checkpoints in a run."""

import argparse
import contextlib
import datetime
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from boost.cli.terminal import print_rows
from boost.errors import BoostError, CheckpointError, DamagedCheckpointError
from boost.format import format_bytes
from boost.text import printable
from boost.train.rundir import require_checkpoint_folder

Result = TypeVar("Result")
Status = Literal["complete", "superseded", "incomplete", "damaged"]


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "checkpoint",
        description="Lists and verifies the checkpoints of a run.",
        epilog="examples:\n"
        "  boost checkpoint list runs/demo\n"
        "  boost checkpoint list runs/demo --json\n"
        "  boost checkpoint verify runs/demo\n"
        "  boost checkpoint verify runs/demo/checkpoints/step-00000200",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, explanation in (
        ("list", "show step, date, size, state and held-out loss of each checkpoint"),
        ("verify", "check every byte against the saved digests; exit code 1 if anything is damaged"),
    ):
        summary = f"{explanation[0].upper()}{explanation[1:]}."
        action = actions.add_parser(name, help=explanation, description=summary, allow_abbrev=False)
        action.add_argument(
            "path", metavar="RUN", help="run directory, checkpoints folder, or a single step-... folder"
        )
        action.add_argument("--json", action="store_true", help="print JSON")
    return parser


def run(args: argparse.Namespace) -> int:
    require_checkpoint_folder(args.path)
    return {"list": _list, "verify": _verify}[args.action](args)


def _list(args: argparse.Namespace) -> int:
    from boost.train.checkpoint import checkpoint_path, read_best
    from boost.train.metrics import read_metrics
    from boost.train.rundir import RunDirectory

    checkpoints = [info for path in checkpoint_folders(Path(args.path)) if (info := unless_removed(path, inspect))]
    if not checkpoints:
        raise CheckpointError(f"'{args.path}': its run rotated every checkpoint away meanwhile; try again")
    folder = checkpoints[0].path.parent
    lines, damaged = [], list[int]()
    metrics = RunDirectory(folder.resolve().parent).metrics
    with contextlib.suppress(OSError):  # a copied checkpoints folder has no metrics
        lines = read_metrics(metrics, damaged)
    losses = {line["step"]: line["heldout_loss"] for line in lines if line["kind"] == "eval"}
    best = read_best(folder)
    best_path = checkpoint_path(folder, best.step) if best else None
    rows, cells = [], []
    for info in checkpoints:
        # The metrics belong to the branch that training continued on.
        loss = None if info.step is None or info.status == "superseded" else losses.get(info.step)
        is_best, saved = info.path == best_path, info.saved.isoformat(timespec="seconds")
        row = {"path": str(info.path), "step": info.step, "saved": saved, "bytes": info.bytes, "state": info.status}
        rows.append(row | {"problem": info.problem, "heldout_loss": loss, "best": is_best})
        state, told = info.status + ", best" * is_best, "-" if loss is None else f"{loss:.4f}"
        cells.append((info.step, f"{info.saved:%Y-%m-%d %H:%M:%S}", format_bytes(info.bytes), told, state))
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0
    headings = ("step", "saved", "size", "held-out loss", "state")
    print_rows(headings, cells, right=("step", "size", "held-out loss"))
    for info in checkpoints:
        if info.problem:
            print(printable(f"{info.path.name}: {info.problem}"))
    if damaged:
        print(printable(f"{metrics.name}: {len(damaged)} unreadable lines, the first is line {damaged[0]}"))
    return 0


def _verify(args: argparse.Namespace) -> int:
    rows = []
    for path in checkpoint_folders(Path(args.path)):
        verified = unless_removed(path, _verified)
        if verified is None:
            if not args.json:
                print(printable(f"{path.name}: rotated away meanwhile"), flush=True)
            continue
        info, problems = verified
        rows.append({"path": str(path), "intact": not problems, "problems": problems})
        if not args.json:
            noted = f" ({info.problem})" if info.problem else ""
            for line in problems or [f"{path.name}: intact{noted}"]:
                print(printable(line), file=sys.stderr if problems else sys.stdout, flush=True)
    if not rows:
        raise CheckpointError(f"'{args.path}': its run rotated every checkpoint away meanwhile; try again")
    if args.json:
        print(json.dumps(rows, indent=2))
    return 0 if all(row["intact"] for row in rows) else 1


def _verified(path: Path) -> "tuple[CheckpointInfo, list[str]]":
    """A checkpoint and what is wrong with its files."""
    if (info := inspect(path)).status == "incomplete":
        return info, [f"'{path}' is incomplete: {info.problem}"]
    return info, [str(info.problem)] if info.status == "damaged" else changed_files(path)


def unless_removed(path: Path, examine: Callable[[Path], Result]) -> Result | None:
    """Examines a checkpoint; None if a live run removed it meanwhile, because what is missing is then no damage."""
    from boost.train.checkpoint import folder_identity

    if (before := folder_identity(path)) is None:
        return None
    try:
        examined = examine(path)
    except (BoostError, OSError):
        if folder_identity(path) == before:
            raise
        return None
    return examined if folder_identity(path) == before else None


@dataclass(frozen=True)
class CheckpointInfo:
    """One checkpoint folder."""

    path: Path
    step: int | None
    status: Status
    """incomplete: no manifest; superseded: abandoned by a rollback or a later `--resume PATH`."""
    bytes: int
    saved: datetime.datetime
    problem: str | None = None
    """What is damaged, or what was wrong with the run when it was saved."""


def checkpoint_folders(path: Path) -> list[Path]:
    """Returns all checkpoint folders at a path (a run directory, a checkpoints folder, or one checkpoint), oldest first,
    whatever their status. Raises CheckpointError if there is none."""
    from boost.train.checkpoint.commit import MANIFEST_FILE, STATE_FILE, TENSORS, step_of

    if (path / STATE_FILE).is_file() or (path / MANIFEST_FILE).is_file() or (path / TENSORS).is_dir():
        return [path]
    # Twice, because a live run may replace every checkpoint while the first list is made.
    for folder in 2 * (path / "checkpoints", path):
        children = folder.iterdir() if folder.is_dir() else ()
        if steps := [child for child in children if child.is_dir() and step_of(child) is not None]:
            return sorted(steps, key=lambda child: (step_of(child) or 0, child.name))
    what = "there is no checkpoint in" if path.exists() else "there is no folder at"
    raise CheckpointError(f"{what} '{path}'; pass a run directory or a step-... folder")


def inspect(path: Path) -> CheckpointInfo:
    """Inspects a checkpoint folder: manifest, file sizes, state and headers. Does not compute digests."""
    from boost.train.checkpoint import open_checkpoint, step_of
    from boost.train.checkpoint.commit import MANIFEST_FILE
    from boost.train.checkpoint.verify import check_size, read_manifest, read_structure

    stats = [file.stat() for file in path.rglob("*") if file.is_file()]
    newest = max((stat.st_mtime for stat in stats), default=path.stat().st_mtime)
    saved = datetime.datetime.fromtimestamp(newest, datetime.UTC).astimezone()
    status: Status = "superseded" if path.name.startswith("superseded-") else "complete"
    problem = None
    try:
        if not (path / MANIFEST_FILE).is_file():
            status, problem = "incomplete", f"no {MANIFEST_FILE}"
        else:
            checkpoint, manifest = open_checkpoint(path), read_manifest(path)
            for name in manifest.root:
                check_size(path, name, manifest)
            read_structure(path, manifest, checkpoint.config.model)
            marks = {"unusable": checkpoint.position.trouble, "unproven": checkpoint.position.doubt}
            problem = "; ".join(f"{kind}: {mark}" for kind, mark in marks.items() if mark) or None
    except BoostError as error:
        status, problem = "damaged", str(error)
    return CheckpointInfo(path, step_of(path), status, sum(stat.st_size for stat in stats), saved, problem)


def changed_files(path: Path) -> list[str]:
    """Compares every byte in a checkpoint with its manifest. Returns one line per changed file."""
    from boost.train.checkpoint.verify import read_manifest, verify_file
    from boost.train.progress import progress

    problems, manifest = [], read_manifest(path)
    for name in progress(sorted(manifest.root), f"{path.name} (files)"):
        try:
            verify_file(path, name, manifest)
        except DamagedCheckpointError as error:
            problems.append(str(error))
    return problems
