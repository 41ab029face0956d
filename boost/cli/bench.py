"""`boost bench`: experiments, each with its result as JSON and as a table or picture."""

import argparse
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from boost.config import Config, load
from boost.config.schema import Family
from boost.errors import ConfigError

FAMILIES = get_args(Family)


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "bench",
        help="run an experiment: loss curves, recomputation, what fits into memory, families side by side",
        description="Runs an experiment and writes its numbers, with a table or a picture, under benchmarks/results.",
        epilog="examples:\n"
        "  boost bench curves                                     the demo's model, 2 processes\n"
        "  boost bench curves demo --tp 4 --train.steps 50 --out /tmp/curves\n"
        "  boost bench recompute demo --batches 4 8 --train.seq_len 512\n"
        "  boost bench fit boost-7b --tp 4 --memory-gb 80\n"
        "  boost bench families --sweep 1e-3 3e-3 1e-2            dense, svd, cola, lax, loro; three seeds each\n"
        "  boost bench families llama-60m --contenders dense cola lax-tensor --seeds 0 1 --jobs 1",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    experiments = parser.add_subparsers(dest="experiment", required=True, metavar="EXPERIMENT")
    curves = _experiment(
        experiments,
        "curves",
        "loss curves of all layouts over each other",
        "Trains one model under every layout that carries it, in float64 and float32, from the same seed and data, and\n"
        "compares every step with one process. Exit code 1 if a difference is above its limit.",
    )
    curves.add_argument(
        "--families",
        nargs="+",
        choices=FAMILIES,
        metavar="F",
        help=f"of {', '.join(FAMILIES)}; default: CONFIG's, and dense",
    )
    recompute = _experiment(
        experiments,
        "recompute",
        "memory saved and time added by every recomputation policy, under every layout",
        "Times the forward and backward pass of a micro-batch under every policy, all of them in one interleaved run on the\n"
        "same weights, and counts the bytes that each keeps.",
    )
    recompute.add_argument(
        "--batches", type=int, nargs="+", default=[4, 8], metavar="B", help="micro-batches (default 4 8)"
    )
    recompute.add_argument("--rounds", type=int, default=15, metavar="N", help="interleaved rounds (default 15)")
    fit = _experiment(
        experiments,
        "fit",
        "the largest batch and longest sequence that fit, under every layout and policy",
        "Runs one process's share of a step on tensors that have shapes and no memory, and searches: no GPU and no other\n"
        "process is needed. A 7B model takes some seconds for each layout and policy.",
    )
    fit.add_argument("--memory-gb", type=float, default=80, metavar="GB", help="of one process (default 80)")
    _add_families(experiments)
    return parser


def _add_families(experiments: Any) -> None:
    families = _experiment(
        experiments,
        "families",
        "dense, svd, cola, lax, loro side by side on the same tokens",
        "Trains CONFIG's model as each contender, with several seeds, the same tokens in the same order and the same schedule,\n"
        "and times a step of each in interleaved rounds. A run is one process with one thread. What is finished is kept in\n"
        "PATH.json: the same command goes on where it stopped, and other settings are refused. Contenders and seeds may be added.",
        tp=False,
    )
    families.add_argument(
        "--contenders",
        nargs="+",
        default=["dense", "svd", "cola", "lax", "loro"],
        metavar="C",
        help="of these, and svd-spectral, lax-svd, lax-tensor, lax-dense (default dense svd cola lax loro)",
    )
    families.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="N", help="(default 0 1 2)")
    families.add_argument(
        "--sweep",
        type=float,
        nargs="+",
        default=[],
        metavar="LR",
        help="peak learning rates of which each contender takes its best on --sweep-seed (default: optim.lr for all)",
    )
    families.add_argument("--sweep-seed", type=int, default=1000, metavar="N", help="(default 1000)")
    families.add_argument(
        "--sweep-steps", type=int, metavar="N", help="steps of a run of the sweep (default train.steps)"
    )
    families.add_argument("--jobs", type=int, metavar="N", help="runs at once (default: one a core, on a GPU one)")
    families.add_argument("--rounds", type=int, default=41, metavar="N", help="of the timing (default 41)")


def run(args: argparse.Namespace) -> int:
    if args.experiment == "families":
        return _families(args)
    if args.tp < 1:
        raise ConfigError(f"--tp = {args.tp} is not a number of processes; the smallest legal value is 1")
    config = load(
        args.config, [*args.overrides, "--parallel.tp", str(args.tp), "--parallel.dp", "1", "--parallel.pp", "1"]
    )
    experiments: dict[str, Callable[[argparse.Namespace, Config], int]] = {
        "curves": _curves,
        "recompute": _recompute,
        "fit": _fit,
    }
    return experiments[args.experiment](args, config)


def _experiment(
    experiments: Any, name: str, summary: str, description: str, tp: bool = True
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = experiments.add_parser(
        name,
        help=summary,
        usage=f"boost bench {name} [CONFIG] {'[--tp N] ' if tp else ''}[--out PATH] [options] [--section.key value ...]",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "config", nargs="?", default="demo", metavar="CONFIG", help="preset or TOML file (default demo)"
    )
    if tp:
        parser.add_argument("--tp", type=int, default=2, metavar="N", help="TP processes (default 2)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("benchmarks/results", name),
        metavar="PATH",
        help=f"PATH.json, and PATH.svg or PATH.md, are written (default benchmarks/results/{name})",
    )
    parser.set_defaults(takes_overrides=True)
    return parser


def _needs_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("the plot needs matplotlib, which is not installed: pip install 'boost-llm[plots]'")


def _curves(args: argparse.Namespace, config: Config) -> int:
    from boost.bench.curves import LIMITS, configuration, contenders, curves_process
    from boost.data.fit import open_fitting_store
    from boost.train.launch import launch, under_torchrun

    _needs_matplotlib()
    if args.tp < 2:
        raise ConfigError(f"--tp = {args.tp} has no layouts to compare; the smallest legal value is 2")
    families = args.families or sorted({config.model.family, "dense"})
    for family in families:  # mistakes are answered before a process is started
        for contender in contenders(family):
            configuration(config, family, next(iter(LIMITS)), {**contender.parallel, "tp": args.tp})
    open_fitting_store(config)
    if under_torchrun():
        return curves_process(config, families, args.out)
    return launch(curves_process, (config, families, args.out), args.tp, log_dir=None)


def _recompute(args: argparse.Namespace, config: Config) -> int:
    from boost.bench.recompute import recompute_process, variants
    from boost.train.launch import launch, under_torchrun

    _needs_matplotlib()
    for field, values in (("--rounds", [args.rounds]), ("--batches", args.batches)):
        if min(values) < 1:
            raise ConfigError(f"{field} = {min(values)} is not positive; the smallest legal value is 1")
    list(variants(config, args.batches))  # mistakes are answered before a process is started
    work = (config, args.batches, args.rounds, args.out)
    return recompute_process(*work) if under_torchrun() else launch(recompute_process, work, args.tp, log_dir=None)


def _fit(args: argparse.Namespace, config: Config) -> int:
    from boost.bench.fit import fit

    if not args.memory_gb > 0:
        raise ConfigError(f"--memory-gb = {args.memory_gb:g} holds nothing; take the memory of one GPU, such as 80")
    return fit(config, args.memory_gb, args.out)


def _families(args: argparse.Namespace) -> int:
    config = load(args.config, [*args.overrides, "--parallel.tp", "1", "--parallel.dp", "1", "--parallel.pp", "1"])
    _needs_matplotlib()
    for field, values, least in (
        ("--seeds", args.seeds, 0),
        ("--sweep-seed", [args.sweep_seed], 0),
        ("--sweep-steps", [config.train.steps if args.sweep_steps is None else args.sweep_steps], 1),
        ("--jobs", [1 if args.jobs is None else args.jobs], 1),
        ("--rounds", [args.rounds], 4),
    ):
        if min(values) < least:
            raise ConfigError(f"{field} = {min(values)} is too small; the smallest legal value is {least}")
        if len(set(values)) < len(values):
            raise ConfigError(f"{field} = {' '.join(str(v) for v in values)} names one twice; name each once")
    if args.sweep_seed in args.seeds:
        raise ConfigError(
            f"--sweep-seed = {args.sweep_seed} is one of --seeds, which rates may not be chosen on; take another"
        )
    if any(not 0 < lr < float("inf") for lr in args.sweep) or len(set(args.sweep)) < len(args.sweep):
        raise ConfigError(f"--sweep = {' '.join(f'{lr:g}' for lr in args.sweep)} must be different rates above 0")

    from boost.bench.families import CONTENDERS, Plan, compare, configuration
    from boost.parallel.mesh import choose_device
    from boost.train.rundir import available_cores

    for name in args.contenders:
        if name not in CONTENDERS or args.contenders.count(name) > 1:
            raise ConfigError(f"--contenders: '{name}' is not known, or named twice; they are {', '.join(CONTENDERS)}")
    steps = args.sweep_steps or config.train.steps
    for name in args.contenders:  # mistakes are answered before a process is started
        for length in {steps, config.train.steps}:
            configuration(config, name, args.sweep_seed, config.optim.lr, length)
    cores = 1 if choose_device(config.run.device).type == "cuda" else available_cores()
    plan = Plan(
        contenders=tuple(args.contenders),
        seeds=tuple(args.seeds),
        sweep=tuple(args.sweep),
        sweep_seed=args.sweep_seed,
        sweep_steps=steps,
        rounds=args.rounds,
        jobs=args.jobs or cores,
    )
    return compare(config, plan, args.out)
