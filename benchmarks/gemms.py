"""`python -m benchmarks gemms`: times the GEMMs of one TP rank's shard of a block."""

import argparse
import sys
from typing import Any

from benchmarks.arguments import require_least, require_rounds
from benchmarks.block_arguments import block_parser, chosen_config, require_distinct
from benchmarks.commands import main
from boost.measure.drawing import needs_matplotlib


def add_parser(experiments: Any) -> argparse.ArgumentParser:
    parser = block_parser(
        experiments,
        "gemms",
        "time and FLOP utilization of a block's GEMMs, by layout and TP",
        "Records the GEMMs of one TP rank's shard of a block and replays them, all layouts in one interleaved run.\n"
        "Runs on one process only, so TP may exceed the number of devices.",
        rounds=9,
        tp=False,
    )
    parser.add_argument(
        "--tps", type=int, nargs="+", default=[1, 2, 4, 8], metavar="P", help="TP sizes (default 1 2 4 8)"
    )
    parser.add_argument(
        "--batch", type=int, metavar="B", help="micro-batch size, in sequences (default 8 on CPUs, 4 on GPUs)"
    )
    return parser


def run(args: argparse.Namespace) -> int:
    require_rounds(args)
    require_distinct("--tps", args.tps)
    if args.batch is not None:
        require_least("--batch", [args.batch])
    needs_matplotlib()

    from benchmarks.experiments import gemms
    from benchmarks.experiments.blocks import block_config, experiment_process

    config, kind = chosen_config(args, 1)
    batch = args.batch or gemms.SEQUENCES[kind]
    for tp in args.tps:  # validate before measuring anything
        for _, contender in gemms.at(tp):
            block_config(config, contender, tp, batch)
    arguments = (args.tps, batch, gemms.SQUARES[kind], args.rounds)
    return experiment_process(gemms.measure, arguments, gemms.section, config, args.out)


if __name__ == "__main__":
    sys.exit(main(["gemms", *sys.argv[1:]]))
