"""`boost runs`: lists the runs in a folder."""

import argparse
import json
import math
from dataclasses import asdict
from pathlib import Path

from boost.cli.terminal import print_rows


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "runs",
        description="Reads run directories, including those of runs in progress. Changes nothing.",
        epilog="examples:\n"
        "  boost runs list runs\n"
        "  boost runs list runs --json\n"
        "  tensorboard --logdir runs        draws and compares the curves",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    what = "one line per run: state, steps, losses, last update"
    listing = actions.add_parser("list", help=what, description=f"Prints {what}.", allow_abbrev=False)
    listing.add_argument(
        "path", metavar="DIR", nargs="?", default="runs", help="folder of run directories (default: runs)"
    )
    listing.add_argument("--json", action="store_true", help="print JSON")
    return parser


def run(args: argparse.Namespace) -> int:
    from boost.measure.run_record import find_runs, read_run

    top = Path(args.path)
    runs = [read_run(path) for path in find_runs(top)]
    if args.json:
        facts = []
        for record in runs:
            fields = asdict(record)
            updated = record.updated and record.updated.isoformat(timespec="seconds")
            facts.append({"run": str(fields.pop("path")), **fields, "updated": updated})
        print(json.dumps(facts, indent=2))
        return 0
    rows = []
    for record in runs:
        name = str(record.path) if record.path == top else str(record.path.relative_to(top))
        when = record.updated.astimezone().strftime("%Y-%m-%d %H:%M") if record.updated else "-"
        losses = (_number(record.loss), _number(record.heldout_loss))
        rows.append([name, record.state, f"{record.step}/{record.total_steps}", *losses, when])
    print_rows(("run", "state", "step", "loss", "held-out", "updated"), rows, piped_width=200)
    return 0


def _number(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.4f}"
