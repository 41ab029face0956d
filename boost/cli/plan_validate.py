"""`boost plan validate`: compares the performance model with measurements."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from boost.cli.terminal import print_table, result_console
from boost.errors import ConfigError
from boost.measure.drawing import needs_matplotlib

if TYPE_CHECKING:
    from boost.measure.results import Facts


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "validate",
        help="compare predictions with papers and with measured steps",
        description="Compares the performance model with the paper's measurements, and with steps measured on CPUs and GPUs\n"
        "(PATH.json). Predictions are recomputed from the profiles stored with the measurements. Exit code 1 if an error\n"
        "exceeds its limit.",
        epilog="examples:\n"
        "  boost plan validate                                    the verdicts\n"
        "  boost plan validate --json                             every number\n"
        "  boost plan validate --write                            rewrite the report in benchmarks/results\n"
        "  boost plan validate --record                           compare with published speeds\n"
        "  boost plan calibrate --out local.toml && boost plan validate --measure --hardware local.toml",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--record",
        action="store_true",
        help="compare with the public record instead: published speeds, by source and GPU",
    )
    parser.add_argument(
        "--measure", action="store_true", help="measure steps on this machine first (takes a few minutes)"
    )
    parser.add_argument("--hardware", type=Path, metavar="FILE", help="hardware profile of this machine, for --measure")
    parser.add_argument("--write", action="store_true", help="write the report (implied by --measure)")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="PATH",
        help="reads PATH.json; writes PATH.json, PATH.md and PATH.svg (default: benchmarks/results/validation, or record)",
    )
    return parser


def run(args: argparse.Namespace) -> int:
    if args.hardware is not None and not args.measure:
        raise ConfigError(f"--hardware = '{args.hardware}' is used only with --measure; add --measure")
    if args.measure or args.write:
        needs_matplotlib()

    if args.record:
        return _record(args)

    from boost.measure.validate import RESULTS, validate

    facts = validate(args.out or RESULTS, args.hardware, args.measure, args.write)
    if args.json:
        print(json.dumps(facts, indent=2))
    else:
        print_verdicts(facts)
    return 0 if all(verdict["holds"] for verdict in facts["verdicts"]) else 1


def _record(args: argparse.Namespace) -> int:
    """Returns 1 if the held-out half misses a limit: its error, the bias of a group, or the fraction of rows within intervals."""
    if args.measure or args.hardware is not None:
        raise ConfigError("--record compares with published speeds; remove --measure and --hardware")

    from rich.table import Table
    from rich.text import Text

    from boost.measure.record import RESULTS, compare, error_table, goals, holds, interval_table, section
    from boost.measure.results import save_section

    facts = compare(show=not args.json)
    if args.write:
        save_section(args.out or RESULTS, facts, section(facts))
    if args.json:
        print(json.dumps(facts, indent=2))
    else:
        console = result_console(120)
        for table in (error_table(facts), interval_table(facts)):
            shown = Table(box=None, pad_edge=False, header_style="dim", title=table.caption, title_justify="left")
            for heading in table.headings:
                shown.add_column(heading.rstrip(":"), justify="right" if heading.endswith(":") else "left")
            for row in table.rows:
                shown.add_row(*row)
            print_table(console, shown)
            console.print()
        for goal in goals(facts):
            style = None if goal.met else "bold red"
            console.print(
                Text(f"{goal.what}: {goal.found} (goal: {goal.figure}) {goal.remark}".rstrip(), style=style or "")
            )
    return 0 if holds(facts) else 1


def print_verdicts(facts: "Facts") -> None:
    """Prints the verdicts, and which measurements are missing."""
    from rich.table import Table
    from rich.text import Text

    from boost.measure.validate import CALIBRATE, GPU, MACHINE
    from boost.measure.validate_report import VERDICT_HEADINGS, verdict_words

    console = result_console(100)
    shown = Table(box=None, pad_edge=False, header_style="dim")
    for heading in VERDICT_HEADINGS:
        shown.add_column(heading.rstrip(":"), justify="right" if heading.endswith(":") else "left", no_wrap=True)
    for verdict in facts["verdicts"]:
        shown.add_row(*verdict_words(verdict), style=None if verdict["holds"] else "bold red")
    print_table(console, shown)
    for name, words, file in (
        (MACHINE, "No steps were measured on CPUs", "local"),
        (GPU, "No GPU was available", "gpu"),
    ):
        if not facts[name]:
            console.print(Text(f"\n{words}: {CALIBRATE.format(name=file)}", style="dim"), soft_wrap=True)
