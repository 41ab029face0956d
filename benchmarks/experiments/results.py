"""Results of an experiment: its numbers as JSON with everything they depend on, and a section of prose, tables and figures.

A result comes from one run on one machine. Numbers from two machines may be shown side by side but are never divided. A section is
rendered as Markdown next to its results, and as part of the HTML report. Experiments that take hours save their results after every
run, and the same command resumes them.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from boost.config import Config
from boost.errors import BoostError, ConfigError
from boost.files import replace_text, storage_errors
from boost.train.rundir import environment


class MeasurementError(BoostError):
    """A measurement is invalid, or two results cannot be compared."""

    exit_code = 3


@dataclass(frozen=True)
class Table:
    """A table of text cells."""

    caption: str
    headings: tuple[str, ...]
    """Column headings. A trailing colon marks a numeric column; `paper` marks the paper's numbers, which are styled differently."""
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Figure:
    """A figure. `draw` writes a file in the format that its suffix names."""

    name: str
    """File name without suffix: letters, digits and hyphens."""
    caption: str
    draw: Callable[[Path], None]


@dataclass(frozen=True)
class Section:
    """The report of one experiment. Its command and machine are stored in the results and shown in every format."""

    title: str
    parts: tuple[str | Table | Figure, ...]
    """Contents in order. A string is a paragraph, whose only markup is `code`."""


@dataclass(frozen=True)
class Ratio:
    """Ratio of two contenders, with its bootstrap interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Goal:
    """A goal of the project, and its result."""

    what: str
    figure: str
    """The target, such as '>= 2.3x'."""
    where: str
    """Sizes, dtype and device of the result."""
    found: str
    """The result with its spread or interval; '' if not measured."""
    met: bool | None
    """Whether the goal is met; None: not measured."""
    kind: Literal["measured", "counted", "modeled"] = "measured"
    remark: str = ""
    """The bottleneck if the goal is not met, or why it could not be measured."""
    ratio: Ratio | None = None
    """The result, if it is the ratio of two contenders."""
    least: float = 0.0
    """Minimum of `ratio`."""


Facts = dict[str, Any]

MACHINE = ("cpu", "cores", "gpus", "platform")
"""Environment keys that identify a machine. Threads, versions and commit may differ."""


def facts_of(experiment: str, config: Config, **numbers: Any) -> Facts:
    """Returns the numbers of an experiment with its name, configuration, command, versions and hardware."""
    return {"experiment": experiment, "environment": environment(config), "config": config.model_dump(), **numbers}


COLUMNS = 132
"""Longest line of numbers, except for a list."""


def write_numbers(path: Path, numbers: object) -> None:
    """Writes JSON in which each list of numbers, and each object that fits, is on one line."""
    path.write_text(_json(numbers) + "\n", encoding="utf-8")


def _json(value: object, indent: int = 0) -> str:
    line, start = json.dumps(value), "\n" + " " * (indent + 1)
    if indent + len(line) <= COLUMNS or not isinstance(value, dict | list):
        return line
    if isinstance(value, dict):
        items = (f"{json.dumps(key)}: {_json(item, indent + 1)}" for key, item in value.items())
        return f"{{{start}{f',{start}'.join(items)}\n{' ' * indent}}}"
    if not any(isinstance(item, dict | list) for item in value):
        return line
    return f"[{start}{f',{start}'.join(_json(item, indent + 1) for item in value)}\n{' ' * indent}]"


def save_section(out: Path, facts: Facts, section: Section) -> None:
    """Writes the numbers as `out`.json, the section as `out`.md, and its figures as NAME.svg. Raises StorageError."""
    with storage_errors(out.parent):
        out.parent.mkdir(parents=True, exist_ok=True)
        out.with_suffix(".json").write_text(json.dumps(facts) + "\n", encoding="utf-8")
        out.with_suffix(".md").write_text(as_markdown(facts, section), encoding="utf-8")
        for figure in figures(section):
            figure.draw(out.parent / f"{figure.name}.svg")


def read(path: Path, experiment: str | None = None) -> Facts:
    """Reads a result file. Raises ConfigError if it is invalid or belongs to an experiment other than `experiment`."""
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; expected a result of an experiment") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON ({error}); expected a result of an experiment") from None
    if not isinstance(facts, dict) or not {"experiment", "environment"} <= facts.keys():
        raise ConfigError(f"{path}: not a result of an experiment; choose another file")
    if experiment is not None and facts["experiment"] != experiment:
        raise ConfigError(f"{path}: a result of '{facts['experiment']}', not of '{experiment}'; choose another file")
    return facts


def require_one_machine(results: Sequence[Facts]) -> None:
    """Raises MeasurementError if results come from different machines."""
    first = results[0]["environment"]
    for other in results[1:]:
        for key in MACHINE:
            if other["environment"].get(key) != first.get(key):
                raise MeasurementError(
                    f"results from different machines cannot be compared: {key} = {first.get(key)!r} in one, "
                    f"{other['environment'].get(key)!r} in another; measure both in one run on the same machine"
                )


def machine(environment: Facts) -> str:
    """Describes the hardware of a result."""
    gpus = environment["gpus"]
    return f"{len(gpus)} x {gpus[0]}" if gpus else f"{environment['cpu']}, {environment['cores']} cores"


def origin(environment: Facts) -> str:
    """Describes machine, threads, versions, commit and date in one line."""
    git = environment["git"] or {}
    commit = f"commit {(git.get('commit') or 'unknown')[:10]}{' with local changes' if git.get('dirty') else ''}"
    threads = f", {environment['threads']} thread(s) per process" if environment.get("threads") else ""
    return (
        f"{machine(environment)}{threads}; torch {environment['torch']}, Python {environment['python']}; {commit}; "
        f"{environment['started'][:10]}"
    )


def figures(section: Section) -> list[Figure]:
    """Returns the figures of a section."""
    return [part for part in section.parts if isinstance(part, Figure)]


def as_markdown(facts: Facts, section: Section) -> str:
    """Renders a section as Markdown: command, machine, then its parts."""
    environment = facts["environment"]
    parts = [f"# {section.title}", f"`{' '.join(environment['command'])}`", origin(environment) + "."]
    for part in section.parts:
        match part:
            case Table():
                parts += [part.caption, table(part.headings, part.rows)]
            case Figure():
                parts.append(f"![{part.caption}]({part.name}.svg)")
            case _:
                parts.append(part)
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Renders a table as Markdown. A heading with a trailing colon marks a numeric column."""
    lines = [f"| {' | '.join(heading.rstrip(':') for heading in headings)} |"]
    lines.append(f"|{'|'.join('--:' if heading.endswith(':') else '---' for heading in headings)}|")
    lines += [f"| {' | '.join(cells)} |" for cells in rows]
    return "\n".join(lines) + "\n"


def percent(error: float) -> str:
    """Formats a relative error with its sign, or '0' if there is none."""
    return "0" if error == 0 else f"{error:+.1%}"


def number(value: float) -> str:
    """Formats a number with at least three significant digits, and with one decimal from 100 to 1000."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{4 if abs(value) >= 100 else 3}g}"


JSON = ".json"
"""Suffix of result files."""


def keep(out: Path, facts: Facts, suffix: str = JSON) -> None:
    """Writes the results so far to `out` with `suffix`, atomically. Raises StorageError."""
    with storage_errors(out.parent):
        out.parent.mkdir(parents=True, exist_ok=True)
        replace_text(out.with_suffix(suffix), json.dumps(facts) + "\n")


def resumed(fresh: Facts, results: Mapping[str, Any], out: Path, suffix: str = JSON) -> Facts:
    """Returns `fresh` plus the values of `results` (name: default) kept in `out` with `suffix`, or the defaults without a file.

    `fresh["settings"]` determines what may be resumed. Raises ConfigError if the file has results with other settings or is not a
    result of a resumable experiment.
    """
    fresh = {**fresh, "settings": json.loads(json.dumps(fresh["settings"]))}  # as read back: lists, not tuples
    path = out.with_suffix(suffix)
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {**fresh, **results}
    except ValueError:
        raise ConfigError(f"--out = '{out}': {path} is not JSON; remove it or choose another --out") from None
    if not isinstance(kept, dict) or "settings" not in kept:
        raise ConfigError(
            f"--out = '{out}': {path} has no settings, so it cannot be resumed (it is from an older version or another "
            "experiment); remove it or choose another --out"
        )
    if (different := next(differences(kept["settings"], fresh["settings"]), None)) is not None:
        raise ConfigError(
            f"--out = '{out}' has results with other settings: {different}; use those settings, choose another --out, "
            f"or remove {path}"
        )
    return {**fresh, **{name: kept.get(name, empty) for name, empty in results.items()}}


def differences(before: Any, now: Any, name: str = "") -> Iterator[str]:
    """Yields a message such as 'config.train.steps is 300 there and 400 here' for each setting that differs."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in {**before, **now}:
            yield from differences(before.get(key), now.get(key), f"{name}.{key}".lstrip("."))
    elif before != now:
        yield f"{name} is {json.dumps(before)} there and {json.dumps(now)} here"
