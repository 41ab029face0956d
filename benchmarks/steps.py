"""`python -m benchmarks steps`: measures end-to-end step time."""

import argparse
import sys
from typing import Any

from benchmarks.arguments import add_rounds, experiment_parser, require_least, require_rounds
from benchmarks.commands import main
from boost.measure.drawing import needs_matplotlib


def add_parser(experiments: Any) -> argparse.ArgumentParser:
    parser = experiment_parser(
        experiments,
        "steps",
        "optimizer step time under every layout and family, with width growing with TP",
        "Times whole optimizer steps, dense and low-rank, with all contenders of a table interleaved, and reports bytes sent and\n"
        "peak memory. Model size depends on device and TP: only CONFIG's optimizer is used, and --section.key applies to every\n"
        "contender. Larger TP sizes run as single-rank emulation if a hardware profile can model their collectives.",
        tp=False,
    )
    parser.add_argument(
        "--tp", type=int, metavar="N", help="TP processes (default: one per GPU, 2 on CPUs); 1 skips sharded models"
    )
    parser.add_argument(
        "--hardware",
        metavar="FILE|NAME",
        help="hardware profile to model the collectives of emulated TP sizes; must match this device type (default: the GPU's\n"
        "profile; on CPUs none, so no emulation)",
    )
    add_rounds(parser, 9)
    return parser


def run(args: argparse.Namespace) -> int:
    require_rounds(args)
    if args.tp is not None:
        require_least("--tp", [args.tp])
    needs_matplotlib()

    from benchmarks.experiments.endtoend import groups, machine_of, steps
    from boost.config import load

    config = load(args.config, args.overrides)
    machine = machine_of(config.run.device, args.tp, args.hardware)
    found = groups(machine, args.overrides, args.config)  # validate before starting any process
    return steps(machine, found, args.rounds, args.out)


if __name__ == "__main__":
    sys.exit(main(["steps", *sys.argv[1:]]))
