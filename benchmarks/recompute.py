"""`python -m benchmarks recompute`: memory and time of activation checkpointing."""

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
        "memory saved and time added by each recomputation policy, under every layout",
        "Times the forward and backward pass of a micro-batch under every policy, all in one interleaved run with the same\n"
        "weights, and counts the activations that each saves for the backward pass.",
    )
    parser.add_argument(
        "--batches",
        type=int,
        nargs="+",
        default=[4, 8],
        metavar="B",
        help="micro-batch sizes, in sequences (default 4 8)",
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
    list(variants(config, args.batches))  # validate before starting any process
    work = (config, args.batches, args.rounds, args.out)
    return recompute_process(*work) if under_torchrun() else launch(recompute_process, work, args.tp, log_dir=None)


if __name__ == "__main__":
    sys.exit(main(["recompute", *sys.argv[1:]]))
