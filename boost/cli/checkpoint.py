"""`boost checkpoint`: lists and verifies the checkpoints in a run."""

import argparse
import contextlib
import datetime
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from boost.cli.terminal import print_rows
from boost.errors import BoostError, CheckpointError, DamagedCheckpointError
from boost.format import format_bytes
from boost.text import JsonObject, printable
from boost.train.rundir import require_checkpoint_folder

Result = TypeVar("Result")


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

    rows = [row for path in checkpoint_folders(Path(args.path)) if (row := unless_removed(path, inspect))]
    if not rows:
        raise CheckpointError(f"'{args.path}': its run rotated every checkpoint away meanwhile; try again")
    folder = Path(rows[0]["path"]).parent
    lines, damaged = [], list[int]()
    metrics = RunDirectory(folder.resolve().parent).metrics
    with contextlib.suppress(OSError):  # a copied checkpoints folder has no metrics
        lines = read_metrics(metrics, damaged)
    losses = {line["step"]: line["heldout_loss"] for line in lines if line["kind"] == "eval"}
    best, cells = read_best(folder), []
    for row in rows:
        # The metrics belong to the branch that training continued on.
        loss = None if row["step"] is None or row["state"] == "superseded" else losses.get(row["step"])
        is_best = best is not None and row["path"] == str(checkpoint_path(folder, best.step))
        row |= {"heldout_loss": loss, "best": is_best}
        saved, told = row["saved"][:19].replace("T", " "), "-" if loss is None else f"{loss:.4f}"
        cells.append((row["step"], saved, format_bytes(row["bytes"]), told, row["state"] + ", best" * is_best))
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0
    headings = ("step", "saved", "size", "held-out loss", "state")
    print_rows(headings, cells, right=("step", "size", "held-out loss"))
    for row in rows:
        if row["problem"]:
            print(printable(f"{Path(row['path']).name}: {row['problem']}"))
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
        noted, problems = verified
        rows.append({"path": str(path), "intact": not problems, "problems": problems})
        if not args.json:
            for line in problems or [f"{path.name}: intact{noted and f' ({noted})'}"]:
                print(printable(line), file=sys.stderr if problems else sys.stdout, flush=True)
    if not rows:
        raise CheckpointError(f"'{args.path}': its run rotated every checkpoint away meanwhile; try again")
    if args.json:
        print(json.dumps(rows, indent=2))
    return 0 if all(row["intact"] for row in rows) else 1


def _verified(path: Path) -> tuple[str, list[str]]:
    """What was noted when a checkpoint was saved, and what is wrong with its files: every byte is compared with the manifest."""
    from boost.train.checkpoint.verify import read_manifest, verify_file
    from boost.train.progress import progress

    row = inspect(path)
    if row["state"] == "incomplete":
        return "", [f"'{path}' is incomplete: {row['problem']}"]
    if row["state"] == "damaged":
        return "", [row["problem"]]
    problems, manifest = [], read_manifest(path)
    for name in progress(sorted(manifest.root), f"{path.name} (files)"):
        try:
            verify_file(path, name, manifest)
        except DamagedCheckpointError as error:
            problems.append(str(error))
    return row["problem"] or "", problems


def unless_removed(path: Path, examine: Callable[[Path], Result]) -> Result | None:
    """Examines a checkpoint; None if a live run removed it meanwhile, because what is missing is then no damage."""
    from boost.train.checkpoint import folder_identity

    if (before := folder_identity(path)) is None:
        return None
    try:
        examined = examine(path)
    except (BoostError, OSError):
        if folder_identity(path) in (before, ()):
            raise
        return None
    return examined if folder_identity(path) in (before, ()) else None


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


def inspect(path: Path) -> JsonObject:
    """Facts about a checkpoint folder, from its manifest, file sizes, state and headers. Does not compute digests.

    `state`: incomplete (no manifest), damaged, superseded (abandoned by a rollback or a later `--resume PATH`) or complete.
    `problem`: what is damaged, or what was wrong with the run when it was saved; None if nothing.
    """
    from boost.train.checkpoint import open_checkpoint, step_of
    from boost.train.checkpoint.commit import MANIFEST_FILE
    from boost.train.checkpoint.verify import check_size, read_manifest, read_structure

    stats = [file.stat() for file in path.rglob("*") if file.is_file()]
    newest = max((stat.st_mtime for stat in stats), default=path.stat().st_mtime)
    saved = datetime.datetime.fromtimestamp(newest, datetime.UTC).astimezone()
    state = "superseded" if path.name.startswith("superseded-") else "complete"
    problem = None
    try:
        if not (path / MANIFEST_FILE).is_file():
            state, problem = "incomplete", f"no {MANIFEST_FILE}"
        else:
            checkpoint, manifest = open_checkpoint(path), read_manifest(path)
            for name in manifest.root:
                check_size(path, name, manifest)
            read_structure(path, manifest, checkpoint.config.model)
            marks = {"unusable": checkpoint.position.trouble, "unproven": checkpoint.position.doubt}
            problem = "; ".join(f"{kind}: {mark}" for kind, mark in marks.items() if mark) or None
    except BoostError as error:
        state, problem = "damaged", str(error)
    row = {"path": str(path), "step": step_of(path), "saved": saved.isoformat(timespec="seconds")}
    return row | {"bytes": sum(stat.st_size for stat in stats), "state": state, "problem": problem}
