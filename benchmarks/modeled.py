"""`python -m benchmarks modeled`: predicts the paper's evaluation with the performance model."""

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.commands import main
from boost.measure.drawing import needs_matplotlib

HARDWARE = ("a100-80g-8", "h100-80g")
"""Same as benchmarks.experiments.modeled.HARDWARE; repeated here to avoid importing torch."""


def add_parser(experiments: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = experiments.add_parser(
        "modeled",
        help="predicted step times of the paper's models, and of 1B to 40B on 4 to 512 GPUs",
        description="Predicts the paper's step times next to the published ones, and the planner's best configuration of every\n"
        "size on 4 to 512 GPUs for dense, vanilla and the best low-rank layout. Pure arithmetic: takes two minutes on two cores.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--hardware",
        nargs="+",
        default=list(HARDWARE),
        metavar="PROFILE",
        help=f"profiles of 8-GPU nodes (default {' '.join(HARDWARE)})",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("benchmarks/results/modeled"),
        metavar="PATH",
        help="write PATH.json, PATH.md and figures (default benchmarks/results/modeled)",
    )
    return parser


def run(args: argparse.Namespace) -> int:
    needs_matplotlib()
    from benchmarks.experiments import modeled

    return modeled.run(args.hardware, args.out)


if __name__ == "__main__":
    sys.exit(main(["modeled", *sys.argv[1:]]))
