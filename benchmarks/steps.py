"""`python -m benchmarks steps`: end-to-end step time."""

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
        "seconds of an optimizer step under every layout and family, as width grows with TP",
        "Times whole optimizer steps, dense and low-rank, all contenders of a table interleaved, with the bytes each sends and\n"
        "holds. Sizes go with the device and TP; of CONFIG the optimizer counts, and --section.key changes all contenders alike.\n"
        "Larger TP sizes run as single-rank emulation, if a hardware profile models their collectives.",
        tp=False,
    )
    parser.add_argument(
        "--tp", type=int, metavar="N", help="TP processes (default: one per GPU, 2 on CPUs; 1: no sharded models)"
    )
    parser.add_argument(
        "--hardware",
        metavar="FILE|NAME",
        help="profile that prices the collectives of shares, of this kind of device (default: that of the GPU; on CPUs none,\n"
        "and no shares)",
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
    found = groups(machine, args.overrides, args.config)  # mistakes are answered before a process is started
    return steps(machine, found, args.rounds, args.out)


if __name__ == "__main__":
    sys.exit(main(["steps", *sys.argv[1:]]))
