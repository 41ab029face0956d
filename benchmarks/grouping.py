"""`python -m benchmarks grouping`: linears with the same input, grouped against ungrouped."""

import argparse
import sys
from typing import Any

from benchmarks.block_arguments import add_batches, block_parser, run_contenders
from benchmarks.commands import main


def add_parser(experiments: Any) -> argparse.ArgumentParser:
    parser = block_parser(
        experiments,
        "grouping",
        "a block with its linears grouped and ungrouped, by layout and batch",
        "Times the forward pass, and the forward and backward pass, of one block with same-input linears grouped and\n"
        "ungrouped, all in one interleaved run. Counts its GEMMs and collectives.",
        rounds=25,
    )
    add_batches(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    return run_contenders(args, "grouping")


if __name__ == "__main__":
    sys.exit(main(["grouping", *sys.argv[1:]]))
