"""Command-line arguments shared by experiments."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from boost.config import Config, load
from boost.errors import ConfigError

RESULTS, PAGE = Path("benchmarks/results"), Path("benchmarks/report.html")
"""The project's own results and their page."""

LEAST_ROUNDS = 7
"""Same as benchmarks.experiments.contest.LEAST_ROUNDS; repeated here to avoid importing torch."""


def experiment_parser(
    experiments: Any, name: str, summary: str, description: str, tp: bool = True, config: str = "demo"
) -> argparse.ArgumentParser:
    """Adds a parser with the arguments shared by experiments: CONFIG, --tp, --out and overrides."""
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
        default=RESULTS / name,
        metavar="PATH",
        help=f"write PATH.json, PATH.md and figures (default benchmarks/results/{name})",
    )
    parser.set_defaults(takes_overrides=True)
    return parser


def add_rounds(parser: argparse.ArgumentParser, default: int) -> None:
    """Adds --rounds, for experiments that measure time."""
    parser.add_argument(
        "--rounds",
        type=int,
        default=default,
        metavar="N",
        help=f"interleaved rounds, at least {LEAST_ROUNDS} (default {default})",
    )


def require_rounds(args: argparse.Namespace) -> None:
    """Raises ConfigError if --rounds is below LEAST_ROUNDS."""
    require_least("--rounds", [args.rounds], LEAST_ROUNDS)


def require_least(field: str, values: Sequence[int], least: int = 1) -> None:
    """Raises ConfigError if any value is below `least`."""
    if min(values) < least:
        what = "is not positive" if least == 1 else "is too small"
        raise ConfigError(f"{field} = {min(values)} {what}; smallest valid value: {least}")


def tp_config(args: argparse.Namespace) -> Config:
    """Loads CONFIG with parallel.tp = --tp and no other parallelism. Raises ConfigError."""
    if args.tp < 1:
        raise ConfigError(f"--tp = {args.tp} must be at least 1; smallest valid value: 1")
    return load(
        args.config, [*args.overrides, "--parallel.tp", str(args.tp), "--parallel.dp", "1", "--parallel.pp", "1"]
    )
