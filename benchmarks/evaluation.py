"""`python -m benchmarks evaluation`: the whole evaluation, resumable, and the report."""

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.arguments import RESULTS, require_least
from benchmarks.commands import main
from boost.errors import ConfigError
from boost.measure.drawing import needs_matplotlib


def add_parser(experiments: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = experiments.add_parser(
        "evaluation",
        help="run all experiments of the report, several launches each, and write the page",
        description="Runs the experiments of the report one after another on this machine, from one commit without changes, and\n"
        "writes results, figures and the page. Timed experiments run in several launches. What is finished is kept in --work:\n"
        "the same command resumes, and says how long it will take. Keep the machine idle.",
        epilog="examples:\n"
        "  python -m benchmarks evaluation --list                    parts, and minutes to go\n"
        "  python -m benchmarks evaluation                           everything (make bench)\n"
        "  python -m benchmarks evaluation --only single gemms recompute --device cuda      what one GPU can run",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="only these parts (default: all)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="run.device (default cpu)")
    parser.add_argument(
        "--launches", type=int, metavar="N", help="launches of every timed part (default: set by the part)"
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("runs/evaluation"),
        metavar="DIR",
        help="finished launches (default runs/evaluation)",
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=RESULTS,
        metavar="DIR",
        help="where results are written (default benchmarks/results); with another DIR, the page is DIR/report.html",
    )
    parser.add_argument("--list", action="store_true", help="list the parts and exit")
    return parser


def run(args: argparse.Namespace) -> int:
    from benchmarks.experiments import evaluation

    known = [part.name for part in evaluation.PARTS]
    for name in args.only:
        if name not in known:
            raise ConfigError(f"--only = {name} is unknown; valid parts: {', '.join(known)}")
    if args.launches is not None:
        require_least("--launches", [args.launches])
    needs_matplotlib()
    chosen = [part for part in evaluation.PARTS if not args.only or part.name in args.only]
    place = evaluation.Place(args.work, args.results, args.device)
    if args.list:
        print(evaluation.listed(chosen, place, args.launches))
        return 0
    return evaluation.evaluate(chosen, place, args.launches)


if __name__ == "__main__":
    sys.exit(main(["evaluation", *sys.argv[1:]]))
