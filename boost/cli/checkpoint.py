"""`boost checkpoint`: lists and verifies the checkpoints of a run."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from boost.cli.terminal import print_rows
from boost.config.text import printable
from boost.errors import BoostError
from boost.format import format_bytes
from boost.train.rundir import require_checkpoint_folder


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "checkpoint",
        help="list and verify checkpoints",
        description="Lists and verifies the checkpoints of a run.\n\n"
        "  list     step, date, size, state and held-out loss of each checkpoint\n"
        "  verify   checks every byte against the digests from the save; exit code 1 if anything is damaged",
        epilog="examples:\n"
        "  boost checkpoint list runs/demo\n"
        "  boost checkpoint list runs/demo --json\n"
        "  boost checkpoint verify runs/demo\n"
        "  boost checkpoint verify runs/demo/checkpoints/step-00000200",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, explanation in (
        ("list", "step, date, size, state and held-out loss of each checkpoint"),
        ("verify", "check every byte against the digests from the save"),
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
    from boost.train.checkpoint.read import checkpoint_folders, inspect
    from boost.train.metrics import read_metrics
    from boost.train.rundir import RunDirectory

    checkpoints = [inspect(path) for path in checkpoint_folders(Path(args.path))]
    folder = checkpoints[0].path.parent
    try:
        lines = read_metrics(RunDirectory(folder.resolve().parent).metrics)
    except (OSError, BoostError):  # a copied folder of checkpoints has none
        lines = []
    losses = {line["step"]: line["heldout_loss"] for line in lines if line.get("kind") == "eval"}
    best = read_best(folder)
    best_path = checkpoint_path(folder, best.step) if best else None
    rows = [
        {
            "path": str(info.path),
            "step": info.step,
            "saved": info.saved.isoformat(timespec="seconds"),
            "bytes": info.bytes,
            "state": info.status,
            "problem": info.problem,
            # The metrics belong to the branch that training continued on.
            "heldout_loss": None if info.step is None or info.status == "superseded" else losses.get(info.step),
            "best": info.path == best_path,
        }
        for info in checkpoints
    ]
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0
    cells = []
    for info, row in zip(checkpoints, rows, strict=True):
        loss = "-" if row["heldout_loss"] is None else f"{row['heldout_loss']:.4f}"
        saved = info.saved.strftime("%Y-%m-%d %H:%M:%S")
        state = f"{info.status}, best" if row["best"] else info.status
        cells.append((info.step, saved, format_bytes(info.bytes), loss, state))
    headings = ("step", "saved", "size", "held-out loss", "state")
    print_rows(headings, cells, right=("step", "size", "held-out loss"))
    for info in checkpoints:
        if info.problem:
            print(printable(f"{info.path.name}: {info.problem}"))
    return 0


def _verify(args: argparse.Namespace) -> int:
    from boost.train.checkpoint.read import checkpoint_folders, inspect, problems_of

    rows = []
    for path in checkpoint_folders(Path(args.path)):
        if (info := inspect(path)).status == "incomplete":
            problems = [f"'{path}' is incomplete: {info.problem}"]
        else:
            problems = problems_of(path)
        rows.append({"path": str(path), "intact": not problems, "problems": problems})
        if not args.json:
            noted = f" ({info.problem})" if info.problem else ""
            for line in problems or [f"{path.name}: intact{noted}"]:
                print(printable(line), file=sys.stderr if problems else sys.stdout, flush=True)
    if args.json:
        print(json.dumps(rows, indent=2))
    return 0 if all(row["intact"] for row in rows) else 1
