"""Results of an experiment: its numbers as JSON with everything that they depend on, plus tables and figures.

A result is of one run on one machine. Numbers of two machines are shown side by side, but never divided.

Timings may appear anywhere in the numbers, with the seconds of every round, in order:

    {"name": "btp-sp", "micro_batch": 4, "seconds": [0.31, 0.30, ...], "median_s": 0.305, "counted_bytes": 4096}
    {"batch": 4, "seconds": {"btp": [0.31, ...], "btp-sp": [0.30, ...]}}

Each of these is a row: `seconds` is a list of numbers, or lists by name. Strings, booleans and integers next to `seconds` and in
the enclosing objects identify the row. Floats, and integers whose key ends in a unit (`benchmarks.experiments.compare.COUNTED`),
are results. `python -m benchmarks compare` finds all rows, and pairs those of two results that have the same identity.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.experiments.document import Figure, Section, Table
from boost.config import Config
from boost.errors import ConfigError, MeasurementError
from boost.train.rundir import environment, storage_errors

Facts = dict[str, Any]

MACHINE = ("cpu", "cores", "gpus", "platform")
"""Environment keys that identify a machine. Threads, versions and commit may differ; see `differences`."""


def facts_of(experiment: str, config: Config, **numbers: Any) -> Facts:
    """Returns the numbers of an experiment with its name, configuration, command, versions and hardware."""
    return {"experiment": experiment, "environment": environment(config), "config": config.model_dump(), **numbers}


def save_section(out: Path, facts: Facts, section: Section) -> None:
    """Writes the numbers as `out`.json, the section as `out`.md, and its figures as NAME.svg. Raises StorageError."""
    with storage_errors(out.parent):
        out.parent.mkdir(parents=True, exist_ok=True)
        out.with_suffix(".json").write_text(json.dumps(facts) + "\n", encoding="utf-8")
        out.with_suffix(".md").write_text(as_markdown(facts, section), encoding="utf-8")
        for figure in figures(section):
            figure.draw(out.parent / f"{figure.name}.svg")


def read(path: Path, experiment: str | None = None) -> Facts:
    """Reads a result file. Raises ConfigError if it is invalid or belongs to another experiment than `experiment`."""
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


def differences(first: Facts, other: Facts) -> list[str]:
    """Differences between two environments that affect times, except machine and commit: 'torch 2.12.0, then 2.13.0', ..."""
    return [
        f"{key} {first.get(key)}, then {other.get(key)}"
        for key in ("boost", "python", "torch", "cuda", "numpy", "threads", "world_size")
        if first.get(key) != other.get(key)
    ]


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


def command_of(facts: Facts) -> str:
    """Returns the command line that produced a result."""
    return " ".join(facts["environment"]["command"])


def figures(section: Section) -> list[Figure]:
    """Returns the figures of a section."""
    return [part for part in section.parts if isinstance(part, Figure)]


def as_markdown(facts: Facts, section: Section) -> str:
    """Renders a section as Markdown: command, machine, then its parts."""
    parts = [f"# {section.title}", f"`{command_of(facts)}`", origin(facts["environment"]) + "."]
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
