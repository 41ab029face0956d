"""Generates reference pages from the code when the site is built: configuration keys, presets, commands, Python API.

`stage.py` writes them to the site's sources.
"""

import argparse
import html
import importlib
import inspect
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import boost.errors
from boost.errors import BoostError

MARKUP = re.compile(r"([\\`*_\[\]#])")


def pages() -> dict[str, str]:
    """The Markdown of every generated page, by its path in the site."""
    return {
        "reference/configuration.md": configuration(),
        "reference/presets.md": presets_page(),
        "reference/commands.md": commands(),
        "reference/python.md": python_api(),
        "reference/troubleshooting.md": troubleshooting(),
    }


def escaped(text: str) -> str:
    """Escapes plain text so that Markdown shows it unchanged."""
    return MARKUP.sub(r"\\\1", html.escape(text, quote=False)).replace("|", "&#124;")


def configuration() -> str:
    """Every key of a configuration file with its type, default and documentation."""
    from boost.config.load import fields, type_name
    from boost.config.schema import Config

    lines = [
        "# Configuration keys",
        "",
        "A configuration is a TOML file with these keys. `boost config --fields` prints this list, and every command that takes a "
        "configuration accepts each key as a flag: `--train.steps 500`. An unknown key or an invalid value raises an error that "
        "names the nearest valid one.",
    ]
    section = ""
    for key, info in fields():
        first = key.partition(".")[0]
        if first != section:
            section = first
            what = paragraph(inspect.getdoc(Config.model_fields[first].annotation) or "")
            title, rest = re.fullmatch(r"([^.:]*)[.:] ?(.*)", what).groups()
            lines += ["", f"## `[{first}]` {escaped(title)} {{ #{first} }}", "", escaped(rest[:1].upper() + rest[1:])]
        default = "computed default (below)" if info.is_required() else f"default `{shown(info.default)}`"
        lines += ["", f"### `{key}` {{ #{key} }}", "", f"`{type_name(info)}`, {default}", ""]
        lines += [escaped(" ".join((info.description or "").split()))]
    return "\n".join(lines) + "\n"


def troubleshooting() -> str:
    """Symptoms with the message that goes with each, what exit codes mean, and terms."""
    facts = tomllib.loads(Path(__file__).with_name("troubleshooting.toml").read_text(encoding="utf-8"))
    errors = [kind for kind in vars(boost.errors).values() if isinstance(kind, type) and issubclass(kind, BoostError)]
    lines = ["# Troubleshooting and terms", "", "## Symptoms"]
    for row in facts["symptoms"]:
        lines += [
            "",
            f"### {row['what']}",
            "",
            f"boost says: *... {escaped(row['message'].strip())} ...*",
            "",
            row["fix"],
        ]
    lines += [
        "",
        "## Errors",
        "",
        "Commands exit with these codes.",
        "",
        "| error | exit code | meaning |",
        "|---|--:|---|",
    ]
    lines += [f"| `{kind.__name__}` | {kind.exit_code} | {escaped(paragraph(kind.__doc__ or ''))} |" for kind in errors]
    lines += ["", "## Terms", "", "| term | meaning |", "|---|---|"]
    lines += [f"| {row['name']} | {row['meaning']} |" for row in facts["terms"]]
    return "\n".join(lines) + "\n"


def shown(value: object) -> str:
    """A default in TOML syntax."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple | list):
        return f"[{', '.join(shown(item) for item in value)}]"
    return "none" if value is None else str(value)


def paragraph(text: str) -> str:
    """The first paragraph of a docstring on one line."""
    return " ".join(text.partition("\n\n")[0].split())


def presets_page() -> str:
    """Every preset with its sizes."""
    from boost.config import load, presets
    from boost.config.architecture import parameter_count
    from boost.config.load import summary

    lines = [
        "# Presets",
        "",
        "A preset is a configuration file that ships with the package. `boost config NAME` prints it with every default resolved.",
    ]
    loaded = {name: load(name) for name in presets()}
    order = sorted(loaded, key=lambda name: (name != "demo", _group(name), parameter_count(loaded[name].model)))
    for number, name in enumerate(order):
        if not number or _group(name) != _group(order[number - 1]):
            lines += [
                "",
                f"## {_group(name)}",
                "",
                "| preset | family | parameters | d | layers | heads | r | TP, PP | |",
            ]
            lines += ["|---|---|--:|--:|--:|--:|--:|---|---|"]
        model, parallel = loaded[name].model, loaded[name].parallel
        lines.append(
            f"| `{name}` | `{model.family}` | {parameter_count(model) / 1e6:,.0f} M | {model.dim} | {model.layers} | "
            f"{model.heads} | {model.rank or ''} | {parallel.tp},&nbsp;{parallel.pp} | {escaped(summary(name))} |"
        )
    return "\n".join(lines) + "\n"


def _group(name: str) -> str:
    """The section of a preset."""
    return name.partition("-")[0]


def commands() -> str:
    """Every command: usage, description, arguments and examples, from its parser."""
    from boost.cli.main import COMMANDS, build_parser

    parser = build_parser()
    lines = ["# Commands", "", escaped(parser.description or ""), "", "| command | what it does |", "|---|---|"]
    group = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    for name, summary in COMMANDS.items():
        lines.append(f"| [`boost {name}`](#boost-{name.replace(' ', '-')}) | {escaped(summary)} |")
    codes = "0 done, 2 a mistake in the input, 3 training or a check failed, 75 try again"
    lines += ["", f"Errors are one line on stderr. Exit codes: {codes} ([details](../clusters.md#restart-and-resume))."]
    for name, command in group.choices.items():
        lines += ["", *command_section(f"boost {name}", command, 2)]
    return "\n".join(lines) + "\n"


def command_section(title: str, parser: argparse.ArgumentParser, level: int) -> Iterator[str]:
    """One command and its subcommands."""
    yield f"{'#' * level} `{title}` {{ #{title.replace(' ', '-')} }}"
    yield from ["", escaped(" ".join((parser.description or "").split()))]
    yield from ["", "```text", usage(parser), "```"]
    formatter, rows, below = parser._get_formatter(), [], []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            below = list(action.choices.items())
        elif action.help != argparse.SUPPRESS and "--help" not in action.option_strings:
            words = " ".join(formatter._expand_help(action).split()) if action.help else ""
            rows.append(f"| {code(invocation(action, formatter))} | {escaped(words)} |")
    if rows:
        yield from ["", "| argument | |", "|---|---|", *rows]
    if parser.epilog:
        yield from ["", "```text", inspect.cleandoc(parser.epilog), "```"]
    for name, child in below:
        yield from ["", *command_section(f"{title} {name}", child, level + 1)]


def usage(parser: argparse.ArgumentParser) -> str:
    """The usage line, wrapped for the page instead of this terminal."""
    if parser.usage is None:
        formatter = argparse.HelpFormatter(parser.prog, width=88)
        formatter.add_usage(None, parser._actions, parser._mutually_exclusive_groups)
        return formatter.format_help().strip()
    return parser.format_usage().strip()


def invocation(action: argparse.Action, formatter: argparse.HelpFormatter) -> str:
    """An argument as its parser formats it, such as '--resume auto|PATH'."""
    if not action.option_strings:
        return formatter._metavar_formatter(action, action.dest)(1)[0]
    values = formatter._format_args(action, formatter._get_default_metavar_for_optional(action))
    return f"{', '.join(action.option_strings)} {values}".strip()


def code(text: str) -> str:
    """Code in a table cell, which may contain a pipe."""
    return f"<code>{html.escape(text).replace('|', '&#124;')}</code>"


PUBLIC = ("boost", "boost.nn")


def python_api() -> str:
    """Every name of the public modules, for mkdocstrings to document."""
    lines = ["# Python API"]
    for module_name in PUBLIC:
        module = importlib.import_module(module_name)
        lines += ["", f"## `{module_name}` {{ #module-{module_name} }}", "", *module_text(module)]
        for name in module.__all__:
            found = getattr(module, name)
            if (full := f"{module_name}.{name}") in PUBLIC:
                continue
            source = found.__name__ if inspect.ismodule(found) else f"{found.__module__}.{found.__qualname__}"
            lines += ["", f"::: {source}", "    options:", f'      heading: "{full}"', f'      toc_label: "{name}"']
    return "\n".join(lines) + "\n"


def module_text(module: object) -> list[str]:
    """A module's docstring; indented examples are also code in Markdown."""
    return (inspect.getdoc(module) or "").splitlines()
