"""`boost runs`: lists the runs of a folder, and compares runs."""

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from boost.errors import ConfigError

if TYPE_CHECKING:
    from boost.measure.run_compare import Curve
    from boost.measure.run_record import RunRecord

METRICS = ("loss", "heldout_loss")
"""Curves to show by default."""
MOST_RUNS = 10
LABEL, COLUMN = 16, 10
"""Widths of the first column and of the other columns of a comparison."""
HELDOUT_FROM, YEAR_FROM = 72, 100
"""Minimum terminal widths at which the list shows the held-out loss, and dates include the year."""


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
        "  boost runs compare runs/a runs/b runs/c --x tokens --metric heldout_loss\n"
        "  boost runs compare runs/a runs/b --out compare.html",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    what = "one line per run: state, steps, losses, last update"
    listing = actions.add_parser("list", help=what, description=f"Prints {what}.")
    listing.add_argument(
        "path", metavar="DIR", nargs="?", default="runs", help="folder of run directories (default: runs)"
    )
    what = "numbers, differences between configurations, curves"
    comparison = actions.add_parser("compare", help=what, description=f"Compares 2 to {MOST_RUNS} runs: {what}.")
    comparison.add_argument("runs", metavar="RUN", nargs="+", help="run directory")
    comparison.add_argument(
        "--metric",
        action="append",
        metavar="NAME",
        help="field of metrics.jsonl to draw; may be repeated (default: loss and heldout_loss)",
    )
    comparison.add_argument("--x", choices=("step", "tokens"), default="step", help="x axis of curves (default: step)")
    comparison.add_argument(
        "--out", metavar="FILE", help="also draw the curves: .png, .svg, .pdf, or .html with the tables"
    )
    for action in (listing, comparison):
        action.allow_abbrev = False
        action.add_argument("--json", action="store_true", help="print JSON")
    return parser


def run(args: argparse.Namespace) -> int:
    return {"list": _list, "compare": _compare}[args.action](args)


def _list(args: argparse.Namespace) -> int:
    from boost.measure.run_compare import facts, number
    from boost.measure.run_record import find_runs, read_run

    top = Path(args.path)
    runs = [read_run(path) for path in find_runs(top)]
    if args.json:
        print(json.dumps(facts(runs), indent=2))
        return 0
    from rich.console import Console
    from rich.table import Table

    width = shutil.get_terminal_size().columns
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("run", overflow="fold")
    table.add_column("state", no_wrap=True)
    heldout = ("held-out",) if width >= HELDOUT_FROM else ()
    for heading in ("step", "loss", *heldout):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("updated", no_wrap=True)
    form = "%Y-%m-%d %H:%M" if width >= YEAR_FROM else "%m-%d %H:%M"
    for record in runs:
        done = record.summary()
        name = str(record.path) if record.path == top else str(record.path.relative_to(top))
        losses = [number(done.loss), *([number(done.heldout_loss)] if heldout else [])]
        when = record.updated.astimezone().strftime(form) if record.updated else "-"
        table.add_row(name, record.state, f"{done.step}/{done.total_steps}", *losses, when)
    Console(width=width, markup=False, highlight=False).print(table)
    return 0


def _compare(args: argparse.Namespace) -> int:
    if not 2 <= len(args.runs) <= MOST_RUNS:
        nearest = 2 if len(args.runs) < 2 else MOST_RUNS
        raise ConfigError(f"RUN: {len(args.runs)} given; nearest valid number of runs to compare: {nearest}")
    metrics = _metrics(args.metric)
    _check_out(args.out)

    from boost.measure.run_compare import config_difference, curves, facts
    from boost.measure.run_record import read_run

    runs = [read_run(Path(path)) for path in args.runs]
    difference = config_difference(runs)
    panels = {metric: found for metric in metrics if (found := curves(runs, metric, args.x))}
    if args.out:
        _write(Path(args.out), panels, args.x, runs, difference)
    if args.json:
        points = {metric: {curve.letter: curve.points for curve in found} for metric, found in panels.items()}
        print(
            json.dumps(
                {"runs": facts(runs), "config": difference, "x": args.x, "curves": points}, indent=2, default=str
            )
        )
        return 0
    _print(runs, difference, panels, args.x)
    if args.out:
        print(f"\nwrote {args.out}")
    return 0


def _metrics(given: list[str] | None) -> Sequence[str]:
    """Returns the fields to draw. Raises ConfigError for an unknown field."""
    import dataclasses
    import difflib

    from boost.train.metrics import EvalMetrics, StepMetrics

    valid = [field.name for kind in (StepMetrics, EvalMetrics) for field in dataclasses.fields(kind)]
    valid = sorted(set(valid) - {"step", "final"})
    for name in given or ():
        if name not in valid:
            close = difflib.get_close_matches(name, valid, 1)
            hint = f"did you mean '{close[0]}'?" if close else f"valid: {', '.join(valid)}"
            raise ConfigError(f"--metric = '{name}' is not a field of metrics.jsonl; {hint}")
    return given or METRICS


def _check_out(out: str | None) -> None:
    if out is None:
        return
    from boost.drawing import needs_matplotlib

    suffix = Path(out).suffix
    if suffix not in (".png", ".svg", ".pdf", ".html"):
        raise ConfigError(
            f"--out = '{out}' must end with .png, .svg, .pdf or .html; nearest valid value: {Path(out).stem}.png"
        )
    needs_matplotlib()


def _write(
    out: Path, panels: "dict[str, list[Curve]]", axis: Any, runs: "list[RunRecord]", difference: dict[str, Any]
) -> None:
    from boost.measure.run_compare import LETTERS, draw, page

    out.parent.mkdir(parents=True, exist_ok=True)
    if out.suffix != ".html":
        draw(panels, axis, out)
        return
    head = ["", *(f"{letter}  {run.path}" for letter, run in zip(LETTERS, runs, strict=False))]
    rows = [[key, *map(_shown, values)] for key, values in difference.items()]
    tables = {"Numbers": [head, *_numbers(runs)], "Configuration (keys that differ)": [head, *rows]}
    out.write_text(page(panels, axis, tables), encoding="utf-8")


def _numbers(runs: "list[RunRecord]") -> list[list[str]]:
    """Returns the table of numbers: one row per number, with a label and one cell per run."""
    from boost.format import format_bytes, format_count, format_duration, format_percent
    from boost.measure.run_compare import number

    rows = []
    for record in runs:
        done = record.summary()
        best = f"{number(done.best_heldout_loss)}" + (f" @{done.best_step}" if done.best_step is not None else "")
        cells = {
            "state": record.state,
            "steps": f"{done.step}/{done.total_steps}",
            "tokens": format_count(done.tokens),
            "train loss": number(done.loss),
            "held-out loss": number(done.heldout_loss),
            "best held-out": best,
            "tokens/s": format_count(done.tokens_per_second) if done.tokens_per_second else "-",
            "MFU": format_percent(done.mfu) if done.mfu is not None else "-",
            "memory": format_bytes(done.memory_bytes) if done.memory_bytes else "-",
            "training time": format_duration(done.seconds),
        }
        rows.append(cells)
    return [[label, *(cells[label] for cells in rows)] for label in rows[0]]


def _print(
    runs: "list[RunRecord]", difference: dict[str, list[Any]], panels: "dict[str, list[Curve]]", axis: str
) -> None:
    from boost.measure.run_compare import LETTERS, text_plot

    width = shutil.get_terminal_size().columns
    for letter, record in zip(LETTERS, runs, strict=False):
        because = f" ({record.reason})" if record.reason else ""
        lines = "1 damaged line" if record.damaged == 1 else f"{record.damaged} damaged lines"
        skipped = f", {lines} of metrics.jsonl skipped" if record.damaged else ""
        print(f"{letter}  {record.path}: {record.state}{because}{skipped}")
    print()
    _print_table(_numbers(runs), len(runs), width)
    if difference:
        print("\nconfiguration differences:")
        _print_table([[key, *map(_shown, values)] for key, values in difference.items()], len(runs), width)
    else:
        print("\nThe configurations are identical.")
    for metric, found in panels.items():
        print(f"\n{metric.replace('_', ' ')} by {axis}")
        print("\n".join(text_plot(found, min(width, 100))))


def _print_table(rows: list[list[str]], runs: int, width: int) -> None:
    """Prints rows of a label and one cell per run, as several tables if the terminal is too narrow for all runs."""
    from rich.console import Console
    from rich.table import Table

    from boost.measure.run_compare import LETTERS

    at_once = max((width - LABEL) // COLUMN, 1)
    for first in range(0, runs, at_once):
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("", overflow="fold")
        for letter in LETTERS[first : min(first + at_once, runs)]:
            table.add_column(letter, justify="right", overflow="fold")
        for label, *cells in rows:
            table.add_row(label, *cells[first : first + at_once])
        Console(width=width, markup=False, highlight=False).print(table)


def _shown(value: Any) -> str:
    return "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
