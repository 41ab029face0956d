"""Command-line arguments shared by single-block experiments."""

import argparse
import importlib
from collections.abc import Sequence
from typing import Any

from benchmarks.arguments import add_rounds, experiment_parser, require_least, require_rounds
from boost.config import Config, load
from boost.errors import ConfigError
from boost.measure.drawing import needs_matplotlib


def block_parser(
    experiments: Any, name: str, summary: str, description: str, rounds: int, tp: bool = True
) -> argparse.ArgumentParser:
    """Adds a parser for a single-block experiment. Without CONFIG, the default depends on the device type."""
    parser = experiment_parser(experiments, name, summary, description, tp=tp, config="")
    for action in parser._actions:
        if action.dest == "config":
            action.help = (
                "preset or TOML file; the experiment runs its first block (default: cola-350m in float32 with 256-token sequences "
                "on CPUs, boost-7b in bfloat16 with 4096-token sequences on GPUs)"
            )
    add_rounds(parser, rounds)
    return parser


def add_batches(parser: argparse.ArgumentParser) -> None:
    """Adds --batches."""
    parser.add_argument(
        "--batches",
        type=int,
        nargs="+",
        default=[1, 4],
        metavar="B",
        help="micro-batch sizes, in sequences (default 1 4)",
    )


def chosen_config(args: argparse.Namespace, tp: int) -> tuple[Config, str]:
    """Returns (configuration for `tp` processes, device type it will run on). Raises ConfigError."""
    from benchmarks.experiments.blocks import DEFAULTS, device_kind

    overrides = [*args.overrides, f"--parallel.tp={tp}", "--parallel.dp=1", "--parallel.pp=1"]
    wanted = load(args.config or DEFAULTS["cpu"][0], args.overrides).run.device
    kind = device_kind(wanted, tp)
    source, changes = (args.config, ()) if args.config else DEFAULTS[kind]
    config = load(source, [*changes, *overrides])
    if not config.model.low_rank:
        raise ConfigError("model.family = 'dense' has no bottleneck to compare; take cola, svd or lax")
    return config, kind


def run_contenders(args: argparse.Namespace, module: str) -> int:
    """Runs `benchmarks.experiments.{module}` on --tp processes.

    The module defines CONTENDERS, `measure(config, mesh, batches, rounds)` and `section`. Raises ConfigError before it starts
    any process.
    """
    if args.tp < 2:
        raise ConfigError(f"--tp = {args.tp} communicates nothing; smallest valid value: 2")
    require_rounds(args)
    require_distinct("--batches", args.batches)
    needs_matplotlib()

    from benchmarks.experiments.blocks import block_config, experiment_process
    from boost.train.launch import launch, under_torchrun

    experiment = importlib.import_module(f"benchmarks.experiments.{module}")
    config, _ = chosen_config(args, args.tp)
    for contender in experiment.CONTENDERS:
        for batch in args.batches:
            block_config(config, contender, args.tp, batch)
    work = (experiment.measure, (args.batches, args.rounds), experiment.section, config, args.out)
    return experiment_process(*work) if under_torchrun() else launch(experiment_process, work, args.tp, log_dir=None)


def require_distinct(field: str, values: Sequence[int]) -> None:
    """Raises ConfigError if any value is not positive or appears twice."""
    require_least(field, values)
    if len(set(values)) < len(values):
        raise ConfigError(f"{field} = {' '.join(map(str, values))} has a duplicate; name each once")
