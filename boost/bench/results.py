"""What an experiment leaves behind: its numbers as JSON with everything that they depend on, a table, a picture."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from boost.config import Config
from boost.train.rundir import environment, storage_errors

Facts = dict[str, Any]


def facts_of(experiment: str, config: Config, **numbers: Any) -> Facts:
    """The numbers of an experiment beside its name, configuration, command, versions and hardware."""
    return {"experiment": experiment, "environment": environment(config), "config": config.model_dump(), **numbers}


def save(
    out: Path,
    facts: Facts,
    table: Callable[[Facts], str] | None = None,
    picture: Callable[[Facts, Path], None] | None = None,
) -> None:
    """Writes `out`.json, and .md and .svg where there is something to make them. Raises StorageError."""
    with storage_errors(out.parent):
        out.parent.mkdir(parents=True, exist_ok=True)
        out.with_suffix(".json").write_text(json.dumps(facts) + "\n", encoding="utf-8")
        if table is not None:
            out.with_suffix(".md").write_text(table(facts), encoding="utf-8")
        if picture is not None:
            picture(facts, out.with_suffix(".svg"))


def markdown(facts: Facts, title: str, caption: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table for people with its command. A heading that ends in a colon is of numbers."""
    command = " ".join(facts["environment"]["command"])
    return f"# {title}\n\n`{command}`\n\n{caption}\n\n{table(headings, rows)}"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown. A heading that ends in a colon is of numbers."""
    lines = [f"| {' | '.join(heading.rstrip(':') for heading in headings)} |"]
    lines.append(f"|{'|'.join('--:' if heading.endswith(':') else '---' for heading in headings)}|")
    lines += [f"| {' | '.join(cells)} |" for cells in rows]
    return "\n".join(lines) + "\n"
