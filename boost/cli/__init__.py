"""The command line: one file per command, each with `add_parser(subparsers) -> parser` and `run(args) -> int | None`."""

import importlib
import keyword
from collections.abc import Sequence
from typing import Any

COMMAND_GROUPS = {
    "data": ("prepare",),
    "training": ("recipe", "train", "config", "eval", "generate"),
    "models": ("runs", "checkpoint", "export", "import"),
    "planning": ("plan", "plan calibrate", "inspect"),
    "clusters": ("verify", "coordinate"),
}
"""Commands by heading, in the order that `boost --help` shows."""

COMMANDS = tuple(name for names in COMMAND_GROUPS.values() for name in names)


def load_command(name: str) -> Any:
    """Imports the module of a command, which is cheap.

    `import` is in import_.py because a keyword cannot be a module name. A two-word command is in a file such as plan_calibrate.py.
    """
    return importlib.import_module(f"boost.cli.{name.replace(' ', '_')}{'_' * keyword.iskeyword(name)}")


def joined(words: Sequence[str], commands: Sequence[str] = COMMANDS) -> list[str]:
    """Joins a two-word command into one element: ['plan calibrate', ...]."""
    two = " ".join(words[:2])
    return [two, *words[2:]] if two in commands and len(words) > 1 else list(words)


class SubcommandGroup:
    """Wraps argparse's subparsers to register a two-word command: prepends the first word."""

    def __init__(self, subparsers: Any, first: str) -> None:
        self.subparsers, self.first = subparsers, first

    def add_parser(self, name: str, **options: Any) -> Any:
        """Same as argparse's `add_parser`."""
        return self.subparsers.add_parser(f"{self.first} {name}", **options)
