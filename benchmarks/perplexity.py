"""`python -m benchmarks perplexity`: compares loss, perplexity and accuracy of all layouts and families."""

import argparse
import sys
from typing import Any

from benchmarks.arguments import experiment_parser, require_least, tp_config
from benchmarks.commands import main
from boost.errors import ConfigError
from boost.measure.drawing import needs_matplotlib

FAMILIES = ("dense", "svd", "cola", "lax", "loro")
"""Same as benchmarks.experiments.families.USUAL; repeated here to avoid importing torch."""
DTYPES = ("float32", "bfloat16")


def add_parser(experiments: Any) -> argparse.ArgumentParser:
    parser = experiment_parser(
        experiments,
        "perplexity",
        "loss curves, held-out perplexity and downstream accuracy of all layouts and families, over several seeds",
        "Trains every family on one process and under every layout that supports it, with the same hyperparameters, tokens and\n"
        "data order and several seeds each, and bounds the difference in held-out perplexity. Exits with code 1 unless layouts\n"
        "differ far less than seeds do. Finished runs are saved in PATH.json: the same command resumes, and different settings\n"
        "are an error. Families, seeds and dtypes may be added.",
    )
    parser.add_argument(
        "--families",
        nargs="+",
        default=list(FAMILIES),
        choices=FAMILIES,
        metavar="F",
        help=f"families to train; loro is svd with LORO as its optimizer (default {' '.join(FAMILIES)})",
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="N", help="training seeds (default 0 1 2)"
    )
    parser.add_argument(
        "--dtypes",
        nargs="+",
        choices=DTYPES,
        metavar="D",
        help=f"dtypes of GEMMs and activations, from {' '.join(DTYPES)}; weights are float32 (default: float32 on CPUs, "
        "bfloat16 on GPUs)",
    )
    parser.add_argument(
        "--few-seeds", type=int, nargs="+", metavar="N", help="seeds of all --dtypes but the first (default: --seeds)"
    )
    parser.add_argument(
        "--questions",
        type=int,
        default=0,
        metavar="N",
        help="also score each run of the first dtype on N questions per task made from held-out text, by lm-evaluation-harness "
        "(default 0: none)",
    )
    return parser


def run(args: argparse.Namespace) -> int:
    config = tp_config(args)
    needs_matplotlib()
    require_least("--tp", [args.tp], 2)
    require_least("--questions", [args.questions], 0)
    for field, seeds in (("--seeds", args.seeds), ("--few-seeds", args.few_seeds or args.seeds)):
        require_least(field, seeds, 0)
        if len(set(seeds)) < max(len(seeds), 2):
            words = " ".join(map(str, seeds))
            raise ConfigError(f"{field} = {words}: a spread needs at least two distinct seeds, such as 0 1 2")
    if unknown := set(args.few_seeds or ()) - set(args.seeds):
        raise ConfigError(f"--few-seeds: {min(unknown)} is not one of --seeds; choose some of those")
    for field, values in (("--families", args.families), ("--dtypes", args.dtypes or ())):
        if len(set(values)) < len(values):
            raise ConfigError(f"{field} = {' '.join(values)} has a duplicate; name each once")

    from benchmarks.experiments.perplexity import ConvergenceExperiment, perplexity_process, start, tasks_of
    from benchmarks.experiments.scores import require_harness
    from boost.parallel.mesh import choose_device
    from boost.train.launch import launch, under_torchrun

    if args.questions:
        require_harness()
    usual = "bfloat16" if choose_device(config.run.device).type == "cuda" else "float32"
    plan = ConvergenceExperiment(
        families=tuple(args.families),
        seeds=tuple(args.seeds),
        dtypes=tuple(args.dtypes or [usual]),
        few_seeds=tuple(args.few_seeds or args.seeds),
        questions=args.questions,
    )
    tasks_of(config, plan)  # validate before starting any process
    start(config, plan, args.out)
    experiment = (config, plan, args.out)
    return (
        perplexity_process(*experiment) if under_torchrun() else launch(perplexity_process, experiment, args.tp, None)
    )


if __name__ == "__main__":
    sys.exit(main(["perplexity", *sys.argv[1:]]))
