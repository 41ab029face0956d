"""One file per command. A command file holds `add_parser(subparsers) -> parser` and `run(args) -> int | None`."""

import importlib
import keyword
from collections.abc import Sequence
from typing import Any

COMMANDS = (
    "prepare",
    "train",
    "eval",
    "generate",
    "config",
    "inspect",
    "plan",
    "plan calibrate",
    "plan validate",
    "bench",
    "checkpoint",
    "export",
    "import",
)


def load_command(name: str) -> Any:
    """The module of one command, which imports nothing heavy by itself. `import` is in import_.py: a keyword names no module;
    a command of two words is in a file of both, as `plan calibrate` in plan_calibrate.py."""
    return importlib.import_module(f"boost.cli.{name.replace(' ', '_')}{'_' * keyword.iskeyword(name)}")


def joined(words: Sequence[str], commands: Sequence[str] = COMMANDS) -> list[str]:
    """A command line whose first word is the command, of two words where there is such a one: ['plan calibrate', ...]."""
    two = " ".join(words[:2])
    return [two, *words[2:]] if two in commands and len(words) > 1 else list(words)


class SubcommandGroup:
    """Takes the place of argparse's subparsers where the second word of a command is registered: adds the first one to it."""

    def __init__(self, subparsers: Any, first: str) -> None:
        self.subparsers, self.first = subparsers, first

    def add_parser(self, name: str, **options: Any) -> Any:
        """As argparse's."""
        return self.subparsers.add_parser(f"{self.first} {name}", **options)
