"""`python -m benchmarks recompute`: activation checkpointing."""

import argparse
import sys
from typing import Any

from benchmarks.arguments import (
    add_rounds,
    experiment_parser,
    require_least,
    require_rounds,
    tp_config,
)
from benchmarks.commands import main
from boost.measure.drawing import needs_matplotlib


def add_parser(experiments: Any) -> argparse.ArgumentParser:
    parser = experiment_parser(
        experiments,
        "recompute",
        "memory saved and time added by every recomputation policy, under every layout",
        "Times the forward and backward pass of a micro-batch under every policy, all of them in one interleaved run on the\n"
        "same weights, and counts the saved activations of each.",
    )
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[4, 8], metavar="B", help="micro-batches (default 4 8)"
    )
    add_rounds(parser, 15)
    return parser


def run(args: argparse.Namespace) -> int:
    config = tp_config(args)
    needs_matplotlib()

    from benchmarks.experiments.recompute import recompute_process, variants
    from boost.train.launch import launch, under_torchrun

    require_rounds(args)
    require_least("--batches", args.batches)
    list(variants(config, args.batches))  # mistakes are answered before a process is started
    work = (config, args.batches, args.rounds, args.out)
    return recompute_process(*work) if under_torchrun() else launch(recompute_process, work, args.tp, log_dir=None)


if __name__ == "__main__":
    sys.exit(main(["recompute", *sys.argv[1:]]))
