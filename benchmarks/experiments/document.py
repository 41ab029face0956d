"""Contents of an experiment's report, independent of the output format: sections of prose, tables and figures.

A section is rendered as Markdown next to its results, and as part of the HTML report.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Table:
    """A table of text cells."""

    caption: str
    headings: tuple[str, ...]
    """Column headings. A trailing colon marks a numeric column; the word `paper` marks the paper's numbers, which are set apart."""
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Figure:
    """A figure. `draw` writes a file in the matplotlib format of its suffix."""

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
    """The bottleneck if the goal is not met, or the reason why it could not be measured."""
