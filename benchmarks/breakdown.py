"""`python -m benchmarks breakdown`: a step by part, measured over the wire and modeled on the paper's GPUs."""

import argparse
import sys
from typing import Any

from benchmarks.commands import main
from benchmarks.ladder import add_paths
from boost.measure.drawing import needs_matplotlib


def add_parser(experiments: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = experiments.add_parser(
        "breakdown",
        help="a step by part (GEMMs, other computation, exposed communication), from the result of 'wire', and modeled",
        description="Reads the steps that the main set of 'wire' recorded, and shows their GEMMs, other computation and exposed\n"
        "communication by layout, next to those of the paper's 7B on A100s, predicted by the performance model. Takes seconds.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_paths(parser, "breakdown")
    return parser


def run(args: argparse.Namespace) -> int:
    needs_matplotlib()
    from benchmarks.experiments.breakdown import breakdown

    return breakdown(args.wire, args.out)


if __name__ == "__main__":
    sys.exit(main(["breakdown", *sys.argv[1:]]))
