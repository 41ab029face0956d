"""`python -m benchmarks fit`: finds the largest batch and longest sequence that fit in memory."""

import argparse
import sys
from typing import Any

from benchmarks.arguments import experiment_parser, tp_config
from benchmarks.commands import main
from boost.errors import ConfigError


def add_parser(experiments: Any) -> argparse.ArgumentParser:
    parser = experiment_parser(
        experiments,
        "fit",
        "largest batch and longest sequence that fit in memory, by layout and recomputation policy",
        "Runs one process's part of a step on fake tensors and searches for the largest size that fits. Needs no GPU and\n"
        "no other process. A 7B model takes a few seconds per layout and policy.",
    )
    parser.add_argument("--memory-gb", type=float, default=80, metavar="GB", help="memory per process (default 80)")
    return parser


def run(args: argparse.Namespace) -> int:
    from benchmarks.experiments.fit import fit

    if not args.memory_gb > 0:
        raise ConfigError(f"--memory-gb = {args.memory_gb:g} must be positive; use the memory of one GPU, such as 80")
    return fit(tp_config(args), args.memory_gb, args.out)


if __name__ == "__main__":
    sys.exit(main(["fit", *sys.argv[1:]]))
