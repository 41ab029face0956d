"""`boost completion`: a completion script for bash, zsh or fish, generated from the parser of every command."""

import argparse
from collections.abc import Iterator
from typing import Any, get_args

from boost.config import presets
from boost.config.load import fields, type_name

SHELLS = ("bash", "zsh", "fish")

_FOLDERS = ("RUN", "CHECKPOINT", "DIR", "STORE")
_FILES = ("FILE", "PATH", "INPUT", "PROFILE", "M", "auto|PATH")


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "completion",
        help="print a completion script for your shell",
        description="Prints a script that completes commands, options, presets and configuration keys. The script is static:\n"
        "regenerate it after you update boost.",
        epilog="examples:\n"
        "  boost completion bash > ~/.local/share/bash-completion/completions/boost\n"
        "  boost completion zsh > ~/.zfunc/_boost           with 'fpath+=~/.zfunc' before compinit in ~/.zshrc\n"
        "  boost completion fish > ~/.config/fish/completions/boost.fish\n"
        "  source <(boost completion bash)                  this session only",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=SHELLS, help="your shell")
    return parser


def run(args: argparse.Namespace) -> int:
    import shtab

    print(shtab.complete(completion_parser(), args.shell))
    return 0


def completion_parser() -> argparse.ArgumentParser:
    """Builds the parser for completion: nests `plan calibrate` in `plan`, adds every configuration key, marks files."""
    from boost.cli.main import build_parser

    parser = build_parser(group=_nested)
    for each in list(_parsers(parser)):
        if each.get_default("takes_overrides"):
            _add_keys(each)
        for action in each._actions:
            _mark(action)
    return parser


def _nested(subparsers: Any, first: str) -> Any:
    """Returns the subparsers of the command `first`, placed before its other positional arguments."""
    parent = subparsers.choices[first]
    found = [action for action in parent._actions if isinstance(action, argparse._SubParsersAction)]
    if found:
        return found[0]
    nested = parent.add_subparsers(metavar="COMMAND")
    parent._actions.sort(key=lambda action: action is not nested)
    return nested


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from _parsers(each)


def _add_keys(parser: argparse.ArgumentParser) -> None:
    for key, info in fields():
        choices = get_args(info.annotation) if " | " in type_name(info) else ()
        choices = ("true", "false") if type_name(info) == "true or false" else choices
        meaning = " ".join((info.description or key).split()).replace("%", "%%")
        parser.add_argument(f"--{key}", choices=choices or None, metavar="VALUE", help=meaning.partition(". ")[0])


def _mark(action: argparse.Action) -> None:
    """Sets shtab's `complete` attribute if the value is a file, a folder or a configuration."""
    import shtab

    if action.choices is not None or action.nargs == 0:
        return
    if action.dest == "config":
        action.complete = _configurations()  # type: ignore[attr-defined]
    elif action.metavar in _FOLDERS:
        action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    elif action.metavar in _FILES:
        action.complete = shtab.FILE  # type: ignore[attr-defined]


def _configurations() -> Any:
    """Completes a preset name or a TOML file."""
    names = " ".join(presets())
    return {
        "bash": "_boost_preset_or_file",  # "file" in the name makes shtab treat candidates as file names
        "zsh": f"{{compadd {names}; _files -g '*.toml'}}",
        "fish": f"{names} (__fish_complete_suffix .toml)",
        "preamble": {
            "bash": "_boost_preset_or_file() {\n"
            f'  compgen -W "{names}" -- "$1"\n'
            "  compgen -f -X '!*.toml' -- \"$1\"\n"
            '  compgen -d -- "$1"\n'
            "}"
        },
    }
