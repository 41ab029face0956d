"""`python -m benchmarks wire`: times whole steps over a rate-limited wire."""

import argparse
import sys
from typing import Any

from benchmarks.arguments import add_rounds, experiment_parser, require_least, require_rounds
from benchmarks.commands import main
from boost.errors import ConfigError
from boost.measure.drawing import needs_matplotlib


def add_parser(experiments: Any) -> argparse.ArgumentParser:
    parser = experiment_parser(
        experiments,
        "wire",
        "time of steps and bare collectives over a rate-limited wire",
        "Creates two network namespaces joined by a rate-limited wire (root, iproute2), runs one CPU process in each, and times\n"
        "whole steps of every layout and bare collectives, all interleaved. Always measures two rates: those at which\n"
        "communication takes 17 % of a btp step, as in the paper's 7B row on A100s, and half of it.",
        tp=False,
    )
    parser.add_argument(
        "--rates",
        type=float,
        nargs="*",
        default=[2000.0],
        metavar="MBIT",
        help="additional rates, Mbit/s (default 2000)",
    )
    parser.add_argument(
        "--layouts",
        nargs="*",
        default=[],
        metavar="L",
        help="only these layouts and btp, such as btp-sp btp-cp (default: all layouts that the goals name)",
    )
    parser.add_argument("--launches", type=int, default=3, metavar="N", help="launches per rate (default 3)")
    add_rounds(parser, 7)
    return parser


def run(args: argparse.Namespace) -> int:
    require_rounds(args)
    require_least("--launches", [args.launches])
    if any(not rate >= 1 for rate in args.rates):
        raise ConfigError(f"--rates = {min(args.rates):g} is too slow; smallest valid value: 1 (Mbit/s)")
    needs_matplotlib()

    from benchmarks.experiments.wire import FORMS

    for layout in args.layouts:
        if layout not in FORMS:
            raise ConfigError(f"--layouts = {layout} is not supported; use one of {', '.join(FORMS)}")

    from benchmarks.experiments.wire import wire

    return wire(args.config, args.overrides, args.rates, args.launches, args.rounds, args.out, args.layouts)


if __name__ == "__main__":
    sys.exit(main(["wire", *sys.argv[1:]]))
