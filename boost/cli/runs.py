"""`boost runs`: lists the runs of a folder, and compares runs."""

import argparse
import itertools
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from boost.cli.terminal import print_rows
from boost.errors import ConfigError

if TYPE_CHECKING:
    from boost.measure.run_record import RunRecord

METRICS = ("loss", "heldout_loss")
"""Curves to print by default, as means over tenths of the steps."""
LETTERS = "ABCDEFGHIJ"
"""Short names of compared runs, in the order of the command line."""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "runs",
        help="list runs, and compare them",
        description="Reads run directories, including those of runs in progress. Changes nothing.\n\n"
        "  list      one line per run: state, steps, losses, last update\n"
        "  compare   numbers side by side, differences between configurations, curves",
        epilog="examples:\n"
        "  boost runs list runs\n"
        "  boost runs list runs --json\n"
        "  boost runs compare runs/svd runs/cola\n"
        "  boost runs compare runs/a runs/b runs/c --metric grad_norm\n"
        "  tensorboard --logdir runs        draws the curves",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    what = "one line per run: state, steps, losses, last update"
    listing = actions.add_parser("list", help=what, description=f"Prints {what}.", allow_abbrev=False)
    listing.add_argument(
        "path", metavar="DIR", nargs="?", default="runs", help="folder of run directories (default: runs)"
    )
    what = "numbers, differences between configurations, curves"
    summary = f"Compares 2 to {len(LETTERS)} runs: {what}."
    comparison = actions.add_parser("compare", help=what, description=summary, allow_abbrev=False)
    comparison.add_argument("runs", metavar="RUN", nargs="+", help="run directory")
    comparison.add_argument(
        "--metric",
        action="append",
        metavar="NAME",
        help="field of metrics.jsonl to print by steps; may be repeated (default: loss and heldout_loss)",
    )
    for action in (listing, comparison):
        action.add_argument("--json", action="store_true", help="print JSON")
    return parser


def run(args: argparse.Namespace) -> int:
    return {"list": _list, "compare": _compare}[args.action](args)


def _list(args: argparse.Namespace) -> int:
    from boost.measure.run_record import find_runs, read_run

    top = Path(args.path)
    runs = [read_run(path) for path in find_runs(top)]
    if args.json:
        print(json.dumps(_facts(runs), indent=2))
        return 0
    rows = []
    for record in runs:
        done = record.summary()
        name = str(record.path) if record.path == top else str(record.path.relative_to(top))
        when = record.updated.astimezone().strftime("%Y-%m-%d %H:%M") if record.updated else "-"
        losses = (_number(done.loss), _number(done.heldout_loss))
        rows.append([name, record.state, f"{done.step}/{done.total_steps}", *losses, when])
    print_rows(("run", "state", "step", "loss", "held-out", "updated"), rows, piped_width=200)
    return 0


def _compare(args: argparse.Namespace) -> int:
    from boost.measure.run_record import config_difference, read_run

    if not 2 <= len(args.runs) <= len(LETTERS):
        nearest = 2 if len(args.runs) < 2 else len(LETTERS)
        raise ConfigError(f"RUN: {len(args.runs)} given; nearest valid number of runs to compare: {nearest}")
    runs = [read_run(Path(path)) for path in args.runs]
    known = sorted({name for record in runs for line in record.lines for name in line} - {"kind", "step"})
    for metric in args.metric or ():
        if metric not in known:
            raise ConfigError(f"--metric = '{metric}' is in no metrics.jsonl of these runs; valid: {', '.join(known)}")
    difference = config_difference(runs)
    curves = {metric: [record.series(metric) for record in runs] for metric in args.metric or METRICS}
    if args.json:
        points = {metric: dict(zip(LETTERS, of_runs, strict=False)) for metric, of_runs in curves.items()}
        print(json.dumps({"runs": _facts(runs), "config": difference, "curves": points}, indent=2, default=str))
        return 0

    for letter, record in zip(LETTERS, runs, strict=False):
        because = f" ({record.reason})" if record.reason else ""
        lines = "1 damaged line" if record.damaged == 1 else f"{record.damaged} damaged lines"
        skipped = f", {lines} of metrics.jsonl skipped" if record.damaged else ""
        print(f"{letter}  {record.path}: {record.state}{because}{skipped}")
    print()
    columns = ("", *LETTERS[: len(runs)])
    print_rows(columns, _numbers(runs), piped_width=200)
    if difference:
        print("\nconfiguration differences:")
        print_rows(columns, [[key, *map(_shown, values)] for key, values in difference.items()], piped_width=200)
    else:
        print("\nThe configurations are identical.")
    for metric, of_runs in curves.items():
        if any(of_runs):
            print(f"\n{metric.replace('_', ' ')} by step")
            end = max(step for points in of_runs for step, _ in points)
            rows = []
            for first, last in itertools.pairwise(sorted({math.ceil(end * tenth / 10) for tenth in range(11)})):
                values = [[value for step, value in points if first < step <= last] for points in of_runs]
                rows.append([str(last), *(_number(statistics.fmean(of_run)) if of_run else "-" for of_run in values)])
            print_rows(columns, rows, piped_width=200)
    return 0


def _facts(runs: "Sequence[RunRecord]") -> list[dict[str, Any]]:
    """State and numbers of each run, for JSON."""
    return [
        {
            "run": str(record.path),
            "state": record.state,
            "reason": record.reason,
            "updated": record.updated.isoformat(timespec="seconds") if record.updated else None,
            **asdict(record.summary()),
            "damaged_lines": record.damaged,
        }
        for record in runs
    ]


def _numbers(runs: "Sequence[RunRecord]") -> list[list[str]]:
    """The table of numbers: one row per number, with a label and one cell per run."""
    from boost.format import format_bytes, format_count, format_duration, format_percent

    columns = []
    for record in runs:
        done = record.summary()
        best = _number(done.best_heldout_loss) + (f" @{done.best_step}" if done.best_step is not None else "")
        cells = {
            "state": record.state,
            "steps": f"{done.step}/{done.total_steps}",
            "tokens": format_count(done.tokens),
            "train loss": _number(done.loss),
            "held-out loss": _number(done.heldout_loss),
            "best held-out": best,
            "tokens/s": format_count(done.tokens_per_second) if done.tokens_per_second else "-",
            "MFU": format_percent(done.mfu) if done.mfu is not None else "-",
            "memory": format_bytes(done.memory_bytes) if done.memory_bytes else "-",
            "training time": format_duration(done.seconds),
        }
        columns.append(cells)
    return [[label, *(cells[label] for cells in columns)] for label in columns[0]]


def _number(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.4f}"


def _shown(value: Any) -> str:
    return "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
