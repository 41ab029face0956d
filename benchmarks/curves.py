"""`python -m benchmarks curves`: compares the loss curves of all layouts."""

import argparse
import sys
from typing import Any

from benchmarks.arguments import experiment_parser, tp_config
from benchmarks.commands import main
from boost.config.schema import ModelConfig
from boost.errors import ConfigError
from boost.measure.drawing import needs_matplotlib

FAMILIES = tuple(ModelConfig.choices)


def add_parser(experiments: Any) -> argparse.ArgumentParser:
    parser = experiment_parser(
        experiments,
        "curves",
        "loss curves of all layouts in one figure",
        "Trains one model under every layout that supports it, in float64 and float32, with the same seed and data, and\n"
        "compares every step against a single process. Exits with code 1 if a difference exceeds its limit.",
    )
    parser.add_argument(
        "--families",
        nargs="+",
        choices=FAMILIES,
        metavar="F",
        help=f"families to train, from {', '.join(FAMILIES)} (default: CONFIG's family and dense)",
    )
    return parser


def run(args: argparse.Namespace) -> int:
    config = tp_config(args)
    needs_matplotlib()
    if args.tp < 2:
        raise ConfigError(f"--tp = {args.tp} has no layouts to compare; smallest valid value: 2")

    from benchmarks.experiments.curves import LIMITS, configuration, curves_process, every_layout
    from boost.data.fit import open_fitting_store
    from boost.train.launch import launch, under_torchrun

    families = args.families or sorted({config.model.family, "dense"})
    for family in families:  # validate before starting any process
        for contender in every_layout(family):
            configuration(config, family, next(iter(LIMITS)), {**contender.parallel, "tp": args.tp})
    open_fitting_store(config)
    if under_torchrun():
        return curves_process(config, families, args.out)
    return launch(curves_process, (config, families, args.out), args.tp, log_dir=None)


if __name__ == "__main__":
    sys.exit(main(["curves", *sys.argv[1:]]))
