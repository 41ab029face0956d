"""`python -m benchmarks traffic`: counts and times the collectives of one block."""

import argparse
import sys
from typing import Any

from benchmarks.block_arguments import add_batches, block_parser, run_contenders
from benchmarks.commands import main


def add_parser(experiments: Any) -> argparse.ArgumentParser:
    parser = block_parser(
        experiments,
        "traffic",
        "bytes and time of a block's collectives, by layout and batch",
        "Counts the collectives of a block as it runs, then times them in isolation, all layouts in one interleaved run.",
        rounds=15,
    )
    add_batches(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    return run_contenders(args, "traffic")


if __name__ == "__main__":
    sys.exit(main(["traffic", *sys.argv[1:]]))
