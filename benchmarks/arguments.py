"""Command-line arguments that experiments have in common."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from boost.config import Config, load
from boost.errors import ConfigError

LEAST_ROUNDS = 7
"""As benchmarks.experiments.contest has it, which imports torch."""


def experiment_parser(
    experiments: Any, name: str, summary: str, description: str, tp: bool = True, config: str = "demo"
) -> argparse.ArgumentParser:
    """A parser with the common arguments of experiments: CONFIG, --tp, --out and overrides."""
    parser: argparse.ArgumentParser = experiments.add_parser(
        name,
        help=summary,
        usage=f"python -m benchmarks {name} [CONFIG] {'[--tp N] ' if tp else ''}[--out PATH] [options] [--section.key value ...]",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "config", nargs="?", default=config, metavar="CONFIG", help=f"preset or TOML file (default {config})"
    )
    if tp:
        parser.add_argument("--tp", type=int, default=2, metavar="N", help="TP processes (default 2)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("benchmarks/results", name),
        metavar="PATH",
        help=f"PATH.json, and PATH.md and pictures, are written (default benchmarks/results/{name})",
    )
    parser.set_defaults(takes_overrides=True)
    return parser


def add_rounds(parser: argparse.ArgumentParser, default: int) -> None:
    """--rounds, of an experiment that times."""
    parser.add_argument(
        "--rounds",
        type=int,
        default=default,
        metavar="N",
        help=f"interleaved rounds, {LEAST_ROUNDS} at least (default {default})",
    )


def require_rounds(args: argparse.Namespace) -> None:
    """Raises ConfigError if --rounds is less than a result takes."""
    require_least("--rounds", [args.rounds], LEAST_ROUNDS)


def require_least(field: str, values: Sequence[int], least: int = 1) -> None:
    """Raises ConfigError for a number below the smallest valid one."""
    if min(values) < least:
        what = "is not positive" if least == 1 else "is too small"
        raise ConfigError(f"{field} = {min(values)} {what}; smallest valid value: {least}")


def tp_config(args: argparse.Namespace) -> Config:
    """The configuration of --tp processes. Raises ConfigError."""
    if args.tp < 1:
        raise ConfigError(f"--tp = {args.tp} must be at least 1; smallest valid value: 1")
    return load(
        args.config, [*args.overrides, "--parallel.tp", str(args.tp), "--parallel.dp", "1", "--parallel.pp", "1"]
    )
