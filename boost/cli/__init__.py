"""One file per command. A command file holds `add_parser(subparsers) -> parser` and `run(args) -> int | None`."""

import importlib
from typing import Any

COMMANDS = ("prepare", "train", "eval", "generate", "config", "inspect", "bench")


def load_command(name: str) -> Any:
    """The module of one command, which imports nothing heavy by itself."""
    return importlib.import_module(f"boost.cli.{name}")
