"""`python -m benchmarks compare`: compares two results of one experiment."""

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.commands import main


def add_parser(experiments: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = experiments.add_parser(
        "compare",
        help="compare two results of one experiment, before and after a change",
        description="Pairs the timings of both results and reports each as faster, slower or indistinguishable, by the ratio of\n"
        "medians with its bootstrap interval. Rejects results of different machines, experiments or dimensions.\n"
        "The two runs were not interleaved, so every ratio includes machine noise between them.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("old", type=Path, metavar="OLD.json", help="a result from before the change")
    parser.add_argument("new", type=Path, metavar="NEW.json", help="a result from after the change")
    return parser


def run(args: argparse.Namespace) -> int:
    from benchmarks.experiments.compare import compare

    print(compare(args.old, args.new))
    return 0


if __name__ == "__main__":
    sys.exit(main(["compare", *sys.argv[1:]]))
