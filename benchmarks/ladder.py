"""`python -m benchmarks ladder`: from published vanilla to the fastest layout, one change at a time."""

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.arguments import RESULTS
from benchmarks.commands import main
from boost.measure.drawing import needs_matplotlib


def add_parser(experiments: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = experiments.add_parser(
        "ladder",
        help="gain of each change from published vanilla to the fastest layout, from the result of 'wire'",
        description="Reads the main set of 'wire' and shows the gain of each change, from published vanilla to the fastest\n"
        "layout, on the share-matched and the slow wire. Takes seconds.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_paths(parser, "ladder")
    return parser


def add_paths(parser: argparse.ArgumentParser, name: str) -> None:
    """Adds --wire and --out, for experiments that read the main set of 'wire'."""
    parser.add_argument(
        "--wire",
        type=Path,
        default=RESULTS / "wire.json",
        metavar="PATH",
        help="result of 'wire --set main' (default benchmarks/results/wire.json)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=RESULTS / name,
        metavar="PATH",
        help=f"write PATH.json, PATH.md and figures (default benchmarks/results/{name})",
    )


def run(args: argparse.Namespace) -> int:
    needs_matplotlib()
    from benchmarks.experiments.ladder import ladder

    return ladder(args.wire, args.out)


if __name__ == "__main__":
    sys.exit(main(["ladder", *sys.argv[1:]]))
