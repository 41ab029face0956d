"""`python -m benchmarks report`: builds one page of all results."""

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

from benchmarks.arguments import PAGE, RESULTS
from benchmarks.commands import main
from boost.errors import ConfigError
from boost.measure.drawing import needs_matplotlib


def add_parser(experiments: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = experiments.add_parser(
        "report",
        help="build one HTML page of all results, with figures as SVG and PNG",
        description="Builds one self-contained HTML page of all results: a first screen with the main figure and numbers, the\n"
        "goals and whether they are met, then every table and figure next to the paper's numbers. Also writes the figures next\n"
        "to the results.",
        epilog="examples:\n"
        "  python -m benchmarks report\n"
        "  python -m benchmarks report --check                             check that the page is up to date\n"
        "  python -m benchmarks report --check --one-commit                also that all results are of one clean commit\n"
        "  python -m benchmarks report --results benchmarks/results --results from-the-gpu --out /tmp/report.html",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--results",
        type=Path,
        action="append",
        metavar="DIR",
        help="read results from DIR and its immediate subfolders; may be repeated (default benchmarks/results)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=PAGE,
        metavar="FILE",
        help="output page (default benchmarks/report.html)",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; exit with code 1 if the page or a figure is out of date",
    )
    parser.add_argument(
        "--one-commit",
        action="store_true",
        help="with --check: also exit with code 1 if results are of several commits, or have uncommitted changes",
    )
    return parser


def run(args: argparse.Namespace) -> int:
    if args.one_commit and not args.check:
        raise ConfigError("--one-commit is a check and needs --check; add it")
    needs_matplotlib()
    if importlib.util.find_spec("jinja2") is None:
        raise ConfigError("the page needs jinja2, which is not installed: pip install -e '.[bench]'")

    from benchmarks.experiments import report

    results = report.read_results(args.results or [RESULTS])
    made = report.make(results, args.out, png=not args.check)
    if args.check:
        outdated = report.stale(made, args.out)
        for path in outdated:
            print(f"{path} is out of date; run 'python -m benchmarks report'", file=sys.stderr)
        astray = report.strays(results) if args.one_commit else []
        for line in astray:
            print(line, file=sys.stderr)
        return int(bool(outdated or astray))
    report.write(made, args.out)
    print(f"{args.out}: {len(results)} results; wrote {len(made.pictures)} figures next to them")
    return 0


if __name__ == "__main__":
    sys.exit(main(["report", *sys.argv[1:]]))
