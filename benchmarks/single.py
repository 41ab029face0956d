"""`python -m benchmarks single`: training steps on one process."""

import argparse
import sys
from typing import Any

from benchmarks.arguments import add_rounds, experiment_parser, require_rounds
from benchmarks.commands import main
from boost.measure.drawing import needs_matplotlib

USUAL = "usual"


def add_parser(experiments: Any) -> argparse.ArgumentParser:
    parser = experiment_parser(
        experiments,
        "single",
        "one process: low-rank against dense, and BOOST against plain PyTorch modules",
        "Times in one interleaved run: whole training steps of dense, cola, svd and lax of the same shape, of transformers'\n"
        "LLaMA, and a large GEMM. Then times each family against the same model in plain PyTorch modules. CONFIG 'usual' is\n"
        "d 512 and d 1024 in fp32 on CPUs, boost-1b in bf16 on a GPU.",
        tp=False,
        config=USUAL,
    )
    add_rounds(parser, 15)
    return parser


def run(args: argparse.Namespace) -> int:
    require_rounds(args)
    needs_matplotlib()

    from benchmarks.experiments.single import FAMILIES, of_family, single, sizes

    configs = sizes(None if args.config == USUAL else args.config, args.overrides)
    for config in configs.values():  # validate before measuring anything
        for family in FAMILIES:
            of_family(config, family)
    return single(configs, args.rounds, args.out)


if __name__ == "__main__":
    sys.exit(main(["single", *sys.argv[1:]]))
