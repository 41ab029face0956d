"""`python -m benchmarks families`: compares model families."""

import argparse
import sys
from typing import Any

from benchmarks.arguments import add_rounds, experiment_parser, require_least, require_rounds
from benchmarks.commands import main
from boost.config import load
from boost.errors import ConfigError
from boost.measure.drawing import needs_matplotlib


def add_parser(experiments: Any) -> argparse.ArgumentParser:
    parser = experiment_parser(
        experiments,
        "families",
        "loss, perplexity and step time of dense, svd, cola, lax, loro and options of low-rank training on the same tokens",
        "Trains CONFIG's model as each contender with several seeds; all contenders use the same tokens, data order and schedule.\n"
        "Then times a step of each in interleaved rounds. Each run uses one process and one thread. Finished runs are saved in\n"
        "PATH.json: the same command resumes, and different settings are an error. Contenders and seeds may be added.",
        tp=False,
    )
    parser.add_argument(
        "--contenders",
        nargs="+",
        default=["dense", "svd", "cola", "lax", "loro"],
        metavar="C",
        help="of these, and svd-spectral, lax-svd, lax-tensor, lax-dense, cola-kv (default dense svd cola lax loro)",
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="N", help="training seeds (default 0 1 2)"
    )
    parser.add_argument(
        "--sweep",
        type=float,
        nargs="+",
        default=[],
        metavar="LR",
        help="peak learning rates to try; each contender uses its best on --sweep-seed (default: optim.lr for all)",
    )
    parser.add_argument("--sweep-seed", type=int, default=1000, metavar="N", help="seed of the sweep (default 1000)")
    parser.add_argument("--sweep-steps", type=int, metavar="N", help="steps per sweep run (default train.steps)")
    parser.add_argument(
        "--equal-time",
        action="store_true",
        help="also train each contender for the time that the first one takes",
    )
    parser.add_argument(
        "--questions",
        type=int,
        default=0,
        metavar="N",
        help="also score each run on N questions per task made from held-out text, by lm-evaluation-harness (default 0: none)",
    )
    parser.add_argument("--jobs", type=int, metavar="N", help="concurrent runs (default: one per core; 1 on a GPU)")
    add_rounds(parser, 41)
    return parser


def run(args: argparse.Namespace) -> int:
    config = load(args.config, [*args.overrides, "--parallel.tp", "1", "--parallel.dp", "1", "--parallel.pp", "1"])
    needs_matplotlib()
    require_rounds(args)
    for field, values, least in (
        ("--seeds", args.seeds, 0),
        ("--sweep-seed", [args.sweep_seed], 0),
        ("--sweep-steps", [config.train.steps if args.sweep_steps is None else args.sweep_steps], 1),
        ("--questions", [args.questions], 0),
        ("--jobs", [1 if args.jobs is None else args.jobs], 1),
    ):
        require_least(field, values, least)
        if len(set(values)) < len(values):
            raise ConfigError(f"{field} = {' '.join(str(v) for v in values)} has a duplicate; name each once")
    if args.sweep_seed in args.seeds:
        raise ConfigError(
            f"--sweep-seed = {args.sweep_seed} is also in --seeds; the sweep needs a separate seed, so use a different one"
        )
    if any(not 0 < lr < float("inf") for lr in args.sweep) or len(set(args.sweep)) < len(args.sweep):
        raise ConfigError(f"--sweep = {' '.join(f'{lr:g}' for lr in args.sweep)} must be distinct and positive")

    from benchmarks.experiments.families import CONTENDERS, FamilyExperiment, compare, configuration
    from benchmarks.experiments.scores import require_harness
    from boost.parallel.mesh import choose_device
    from boost.train.rundir import available_cores

    if args.questions:
        require_harness()
    for name in args.contenders:
        if name not in CONTENDERS or args.contenders.count(name) > 1:
            raise ConfigError(f"--contenders: '{name}' is unknown or a duplicate; valid names: {', '.join(CONTENDERS)}")
    steps = args.sweep_steps or config.train.steps
    for name in args.contenders:  # validate before starting any process
        for length in {steps, config.train.steps}:
            configuration(config, name, args.sweep_seed, config.optim.lr, length)
    cores = 1 if choose_device(config.run.device).type == "cuda" else available_cores()
    plan = FamilyExperiment(
        contenders=tuple(args.contenders),
        seeds=tuple(args.seeds),
        sweep=tuple(args.sweep),
        sweep_seed=args.sweep_seed,
        sweep_steps=steps,
        rounds=args.rounds,
        jobs=args.jobs or cores,
        equal_time=args.equal_time,
        questions=args.questions,
    )
    return compare(config, plan, args.out)


if __name__ == "__main__":
    sys.exit(main(["families", *sys.argv[1:]]))
