"""One file per command. A command file holds `add_parser(subparsers) -> parser` and `run(args) -> int | None`."""

import importlib
import keyword
from typing import Any

COMMANDS = ("prepare", "train", "eval", "generate", "config", "inspect", "bench", "export", "import")


def load_command(name: str) -> Any:
    """The module of one command, which imports nothing heavy by itself. `import` is in import_.py: a keyword names no module."""
    return importlib.import_module(f"boost.cli.{name}{'_' * keyword.iskeyword(name)}")
