"""`python -m benchmarks perplexity`: compares the final perplexity of all layouts."""

import argparse
import sys
from typing import Any

from benchmarks.arguments import experiment_parser, require_least, tp_config
from benchmarks.commands import main
from boost.config.schema import ModelConfig
from boost.errors import ConfigError
from boost.measure.drawing import needs_matplotlib

FAMILIES = tuple(ModelConfig.choices)
DTYPES = ("float32", "bfloat16")


def add_parser(experiments: Any) -> argparse.ArgumentParser:
    parser = experiment_parser(
        experiments,
        "perplexity",
        "loss curves and final held-out perplexity of all layouts, over several seeds",
        "Trains one model on one process and under every layout that supports it, with the same hyperparameters and data\n"
        "order and several seeds each, and compares held-out perplexity. Exits with code 1 unless layouts differ far less\n"
        "than seeds do.",
    )
    parser.add_argument(
        "--families",
        nargs="+",
        choices=FAMILIES,
        metavar="F",
        help=f"families to train, from {', '.join(FAMILIES)} (default: CONFIG's family and dense)",
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="N", help="training seeds (default 0 1 2)"
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="dtype of GEMMs and activations; weights are float32 (default: float32 on CPUs, bfloat16 on GPUs)",
    )
    return parser


def run(args: argparse.Namespace) -> int:
    config = tp_config(args)
    needs_matplotlib()
    require_least("--tp", [args.tp], 2)
    require_least("--seeds", args.seeds, 0)
    if len(set(args.seeds)) < max(len(args.seeds), 2):
        words = " ".join(map(str, args.seeds))
        raise ConfigError(f"--seeds = {words}: a spread needs at least two distinct seeds, such as 0 1 2")

    from benchmarks.experiments.perplexity import perplexity_process, work
    from boost.data.fit import open_fitting_store
    from boost.train.launch import launch, under_torchrun

    families = args.families or sorted({config.model.family, "dense"})
    # Validate before starting any process.
    for _, of_run in work(config, families, args.dtype or "float32", args.seeds):
        open_fitting_store(of_run)
    experiment = (config, families, args.dtype, args.seeds, args.out)
    return (
        perplexity_process(*experiment) if under_torchrun() else launch(perplexity_process, experiment, args.tp, None)
    )


if __name__ == "__main__":
    sys.exit(main(["perplexity", *sys.argv[1:]]))
