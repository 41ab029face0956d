"""`boost bench compare`: two results of one experiment."""

import argparse
from pathlib import Path
from typing import Any


def add_parser(experiments: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = experiments.add_parser(
        "compare",
        help="two results of one experiment, before and after a change",
        description="Pairs what both results timed and says what is faster, slower, or not seen to differ, by the ratio of\n"
        "medians with its bootstrap interval. Results of different machines, experiments or dimensions are refused.\n"
        "The two were not measured in turns: how fast the machine was at either time is in every ratio.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("old", type=Path, metavar="OLD.json", help="a result from before the change")
    parser.add_argument("new", type=Path, metavar="NEW.json", help="one from behind it")
    return parser


def run(args: argparse.Namespace) -> int:
    from boost.bench.compare import compare

    print(compare(args.old, args.new))
    return 0
