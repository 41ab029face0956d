"""Command line of the benchmarks: `python -m benchmarks EXPERIMENT` or `boost bench EXPERIMENT`."""

import argparse
import importlib
import sys
from collections.abc import Sequence

from boost.cli.main import run_command, split_overrides

EXPERIMENTS = (
    "steps",
    "parts",
    "single",
    "ideal",
    "gemms",
    "traffic",
    "wire",
    "ladder",
    "breakdown",
    "grouping",
    "norms",
    "recompute",
    "fit",
    "curves",
    "perplexity",
    "families",
    "healing",
    "modeled",
    "evaluation",
    "report",
    "compare",
)
"""In help order. Each has a file NAME.py that defines `add_parser` and `run`."""


def build_parser() -> argparse.ArgumentParser:
    """Builds the parser with one subcommand per experiment."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Runs an experiment and writes its results, with tables and figures, to benchmarks/results.",
        epilog="examples:\n"
        "  python -m benchmarks steps                    step time by layout, family and size\n"
        "  python -m benchmarks parts                    ablation: one optimization added at a time\n"
        "  python -m benchmarks gemms --tps 1 4          GEMMs of a block by layout; also traffic, grouping, norms\n"
        "  python -m benchmarks recompute demo --batches 4 8 --train.seq_len 512\n"
        "  python -m benchmarks fit boost-7b --tp 4 --memory-gb 80\n"
        "  python -m benchmarks curves demo --tp 4 --train.steps 50 --out /tmp/curves\n"
        "  python -m benchmarks perplexity demo --tp 2 --seeds 0 1 2   loss and perplexity of every layout and family\n"
        "  python -m benchmarks families --sweep 1e-3 3e-3 1e-2        dense, svd, cola, lax, loro; three seeds each\n"
        "  python -m benchmarks evaluation               all of these for the report, several launches each, resumable\n"
        "  python -m benchmarks report                   all results as one page, benchmarks/report.html\n"
        "  python -m benchmarks compare old/recompute.json benchmarks/results/recompute.json\n"
        "python -m benchmarks.steps and (from a checkout) boost bench steps are equivalent.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subparsers = parser.add_subparsers(dest="command", metavar="EXPERIMENT", required=True)
    for name in EXPERIMENTS:
        command = importlib.import_module(f"benchmarks.{name}")
        subparser = command.add_parser(subparsers)
        subparser.allow_abbrev = False
        subparser.add_argument("--debug", action="store_true", help="show the full traceback of an error")
        subparser.set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one experiment and returns its exit code, like `boost.cli.main.main`. Without arguments, lists the experiments."""
    words, overrides = split_overrides(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
    if not words:
        parser.print_help()
        return 0
    return run_command(parser, words, overrides)
