"""`boost bench`: experiments, each with its result as JSON and as a table or picture."""

import argparse
import importlib
from typing import Any

EXPERIMENTS = (
    "steps",
    "parts",
    "single",
    "ideal",
    "gemms",
    "traffic",
    "wire",
    "grouping",
    "norms",
    "recompute",
    "fit",
    "curves",
    "perplexity",
    "families",
    "modeled",
    "report",
    "compare",
)
"""In the order of the help. Each is a file, bench_NAME.py, with `add_parser` and `run`."""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "bench",
        help="rerun the paper's evaluation: individual experiments, and one page of all results",
        description="Runs an experiment and writes its results, with tables and figures, to benchmarks/results.",
        epilog="examples:\n"
        "  boost bench steps                                      a training step by layout, family and size\n"
        "  boost bench parts                                      one optimization added at a time\n"
        "  boost bench gemms --tps 1 4                            a block's products by layout; traffic, grouping, norms likewise\n"
        "  boost bench recompute demo --batches 4 8 --train.seq_len 512\n"
        "  boost bench fit boost-7b --tp 4 --memory-gb 80\n"
        "  boost bench curves demo --tp 4 --train.steps 50 --out /tmp/curves\n"
        "  boost bench perplexity demo --tp 2 --seeds 0 1 2       final perplexity of every layout\n"
        "  boost bench families --sweep 1e-3 3e-3 1e-2            dense, svd, cola, lax, loro; three seeds each\n"
        "  boost bench report                                     all results as one page, benchmarks/report.html\n"
        "  boost bench compare old/recompute.json benchmarks/results/recompute.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    experiments = parser.add_subparsers(dest="experiment", required=True, metavar="EXPERIMENT")
    for name in EXPERIMENTS:
        command = importlib.import_module(f"boost.cli.bench_{name.replace('-', '_')}")
        command.add_parser(experiments).set_defaults(run_experiment=command.run)
    return parser


def run(args: argparse.Namespace) -> int:
    return int(args.run_experiment(args))
