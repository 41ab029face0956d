"""`python -m benchmarks grouping`: linears of one input, grouped or ungrouped."""

import argparse
import sys
from typing import Any

from benchmarks.block_arguments import add_batches, block_parser, run_contenders
from benchmarks.commands import main


def add_parser(experiments: Any) -> argparse.ArgumentParser:
    parser = block_parser(
        experiments,
        "grouping",
        "a block with linears grouped and ungrouped, by layout and batch",
        "Times one block forward, and forward and backward, with its linears of one input grouped and ungrouped, all in one\n"
        "interleaved run, and counts its products and collectives.",
        rounds=25,
    )
    add_batches(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    return run_contenders(args, "grouping")


if __name__ == "__main__":
    sys.exit(main(["grouping", *sys.argv[1:]]))
