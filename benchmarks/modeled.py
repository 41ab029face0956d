"""`python -m benchmarks modeled`: the paper's evaluation, predicted by the performance model."""

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.commands import main
from boost.measure.drawing import needs_matplotlib

HARDWARE = ("a100-80g-8", "h100-80g", "h200-141g")
"""As benchmarks.experiments.modeled has them, which imports torch."""


def add_parser(experiments: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = experiments.add_parser(
        "modeled",
        help="the paper's step times, and the 7B and 40B on other GPUs, by the performance model",
        description="Predicts the paper's step times next to the published ones, and what the best low-rank layout\n"
        "gains for the 7B on 4 and 8 GPUs and for the 40B on 32. Arithmetic: seconds, on any machine.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--hardware",
        nargs="+",
        default=list(HARDWARE),
        metavar="PROFILE",
        help=f"of the 7B and the 40B, nodes of eight (default {' '.join(HARDWARE)})",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("benchmarks/results/modeled"),
        metavar="PATH",
        help="PATH.json, PATH.md and pictures are written (default benchmarks/results/modeled)",
    )
    return parser


def run(args: argparse.Namespace) -> int:
    needs_matplotlib()
    from benchmarks.experiments import modeled

    return modeled.run(args.hardware, args.out)


if __name__ == "__main__":
    sys.exit(main(["modeled", *sys.argv[1:]]))
