"""`boost bench`: alias for `python -m benchmarks`, the evaluation. It is part of a checkout and is not installed."""

import argparse
import sys
from pathlib import Path
from typing import Any

from boost.errors import ConfigError


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "bench", help="rerun the paper's evaluation (in a checkout)", add_help=False
    )
    parser.set_defaults(takes_overrides=True)
    return parser


def run(args: argparse.Namespace) -> int:
    """Forwards all arguments. Raises ConfigError outside a checkout."""
    for root in (Path(__file__).parents[2], Path.cwd()):
        if (root / "benchmarks" / "commands.py").is_file() and str(root) not in sys.path:
            sys.path.append(str(root))
    try:
        from benchmarks.commands import main
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("benchmarks"):
            raise
        raise ConfigError(
            "boost bench needs a checkout, because the evaluation is not part of the installed package; "
            "clone the BOOST repository and run 'boost bench' there"
        ) from None
    return main([*args.overrides, *["--debug"] * args.debug])
