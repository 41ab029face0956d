"""`python -m benchmarks norms`: RMSNorm over a sharded width, sync against online."""

import argparse
import sys
from typing import Any

from benchmarks.block_arguments import add_batches, block_parser, run_contenders
from benchmarks.commands import main


def add_parser(experiments: Any) -> argparse.ArgumentParser:
    parser = block_parser(
        experiments,
        "norms",
        "RMSNorm over a sharded width: sync against online, by batch, with the rounding error of both",
        "Times one block under btp with each norm, and the norms alone, all in one interleaved run. Then compares the\n"
        "gradients of each in bfloat16 with those of one process in float32.",
        rounds=25,
    )
    add_batches(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    return run_contenders(args, "norms")


if __name__ == "__main__":
    sys.exit(main(["norms", *sys.argv[1:]]))
