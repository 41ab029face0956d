"""`python -m benchmarks healing`: dense models factorized and healed."""

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.arguments import experiment_parser, require_least
from benchmarks.commands import main
from boost.config import load
from boost.errors import ConfigError
from boost.measure.drawing import needs_matplotlib


def add_parser(experiments: Any) -> argparse.ArgumentParser:
    parser = experiment_parser(
        experiments,
        "healing",
        "dense in, low-rank out, healed: perplexity before and after training",
        "Trains CONFIG's model densely with several seeds, factorizes it at several budgets, one ingredient at a time, and\n"
        "heals it on a small fraction of the tokens, with and without the dense model as teacher. One process with one\n"
        "thread. What is finished is kept in PATH.json and --work: the same command resumes.",
        tp=False,
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="N", help="(default 0 1 2)")
    parser.add_argument(
        "--budgets",
        type=float,
        nargs="+",
        default=[0.8, 0.6],
        metavar="FRACTION",
        help="parameters of the linears that remain (default 0.8 0.6)",
    )
    parser.add_argument(
        "--heal", type=float, default=0.02, metavar="FRACTION", help="of the dense model's steps (default 0.02)"
    )
    parser.add_argument(
        "--heal-lrs", type=float, nargs="+", default=[1e-4], metavar="LR", help="peak rates of healing (default 1e-4)"
    )
    parser.add_argument(
        "--calibrate-tokens", type=int, default=1 << 15, metavar="N", help="calibration tokens (default 32768)"
    )
    parser.add_argument(
        "--work", type=Path, default=Path("runs/healing"), metavar="DIR", help="checkpoints (default runs/healing)"
    )
    return parser


def run(args: argparse.Namespace) -> int:
    config = load(args.config, [*args.overrides, "--model.family", "dense", "--parallel.tp", "1", "--parallel.dp", "1"])
    needs_matplotlib()
    require_least("--seeds", args.seeds, 0)
    require_least("--calibrate-tokens", [args.calibrate_tokens])
    for flag, values in (("--budgets", args.budgets), ("--heal", [args.heal])):
        if not all(0 < value <= 1 for value in values):
            raise ConfigError(f"{flag} = {' '.join(f'{v:g}' for v in values)} must be fractions in (0, 1]")
    if not all(0 < lr < float("inf") for lr in args.heal_lrs):
        raise ConfigError(
            f"--heal-lrs = {' '.join(f'{v:g}' for v in args.heal_lrs)} must be above 0; typical value: 1e-4"
        )

    from benchmarks.experiments.healing import HealingExperiment, measure

    plan = HealingExperiment(
        tuple(args.seeds), tuple(args.budgets), args.heal, tuple(args.heal_lrs), args.calibrate_tokens, args.work
    )
    return measure(config, plan, args.out)


if __name__ == "__main__":
    sys.exit(main(["healing", *sys.argv[1:]]))
