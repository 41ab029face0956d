"""`python -m benchmarks parts`: ablation, one optimization at a time."""

import argparse
import sys
from typing import Any, get_args

from benchmarks.arguments import add_rounds, experiment_parser, require_least, require_rounds
from benchmarks.commands import main
from boost.config.schema import DType
from boost.errors import ConfigError
from boost.measure.drawing import needs_matplotlib


def add_parser(experiments: Any) -> argparse.ArgumentParser:
    parser = experiment_parser(
        experiments,
        "parts",
        "ablation: gain of each optimization, from megatron-sp to btp-sp",
        "Times whole optimizer steps, from the dense model under megatron-sp to btp-sp, adding one optimization at a time, then\n"
        "the time and memory of recomputation. All are interleaved in one run. Model size depends on device and TP, as in 'steps'.",
        tp=False,
    )
    parser.add_argument("--tp", type=int, metavar="N", help="TP processes (default: one per GPU, 2 on CPUs)")
    parser.add_argument(
        "--dtypes",
        nargs="+",
        choices=get_args(DType),
        default=["bfloat16"],
        metavar="D",
        help="compute dtypes (default bfloat16)",
    )
    parser.add_argument(
        "--shares",
        type=int,
        nargs="+",
        default=[],
        metavar="N",
        help="also measure these TP sizes by single-rank emulation",
    )
    parser.add_argument("--hardware", metavar="FILE|NAME", help="hardware profile to model the collectives of --shares")
    parser.add_argument("--compile", action="store_true", help="add a step with torch.compile")
    add_rounds(parser, 9)
    return parser


def run(args: argparse.Namespace) -> int:
    require_rounds(args)
    for field, values in (("--tp", [args.tp] if args.tp is not None else []), ("--shares", args.shares)):
        if values:
            require_least(field, values, 2)
    needs_matplotlib()

    from benchmarks.experiments.endtoend import machine_of
    from benchmarks.experiments.parts import groups, parts
    from boost.config import load

    machine = machine_of(load(args.config, args.overrides).run.device, args.tp, args.hardware)
    if args.shares and machine.hardware is None:
        raise ConfigError(f"--shares = {' '.join(map(str, args.shares))}: {machine.why_no_shares}")
    found = groups(machine, args.dtypes, args.shares, args.compile, args.overrides, args.config)
    if not found:
        raise ConfigError(
            "--tp = 1 shards nothing, and there is one GPU; add --shares, such as 2 4 8, or --run.device cpu"
        )
    return parts(machine, found, args.rounds, args.out)


if __name__ == "__main__":
    sys.exit(main(["parts", *sys.argv[1:]]))
