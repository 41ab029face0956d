"""What experiments with a single block have in common on the command line."""

import argparse
from typing import Any

from boost.cli.bench_common import add_rounds, experiment_parser
from boost.config import Config, load
from boost.errors import ConfigError


def block_parser(experiments: Any, name: str, summary: str, description: str, rounds: int, tp: bool = True) -> Any:
    """A parser of an experiment with a block: CONFIG may be left out, which takes one by the kind of device."""
    parser = experiment_parser(experiments, name, summary, description, tp=tp, config="")
    for action in parser._actions:
        if action.dest == "config":
            action.help = (
                "preset or TOML file whose first block is taken (default: cola-350m in float32 with sequences of 256 tokens on a "
                "CPU, boost-7b in bfloat16 with 4096 on GPUs)"
            )
    add_rounds(parser, rounds)
    return parser


def add_batches(parser: argparse.ArgumentParser) -> None:
    """--batches, of an experiment that repeats over them."""
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[1, 4], metavar="B", help="sequences of a micro-batch (default 1 4)"
    )


def chosen_config(args: argparse.Namespace, tp: int) -> tuple[Config, str]:
    """(configuration over `tp` processes, kind of device that it will run on). Raises ConfigError."""
    from boost.bench.blocks import DEFAULTS, device_kind

    overrides = [*args.overrides, f"--parallel.tp={tp}", "--parallel.dp=1", "--parallel.pp=1"]
    wanted = load(args.config or DEFAULTS["cpu"][0], args.overrides).run.device
    kind = device_kind(wanted, tp)
    source, changes = (args.config, ()) if args.config else DEFAULTS[kind]
    config = load(source, [*changes, *overrides])
    if not config.model.low_rank:
        raise ConfigError("model.family = 'dense' has no bottleneck to compare; take cola, svd or lax")
    return config, kind


def require_two(tp: int) -> None:
    """Raises ConfigError for one process, which sends nothing."""
    if tp < 2:
        raise ConfigError(f"--tp = {tp} sends nothing; the smallest legal value is 2")
