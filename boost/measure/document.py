"""Contents of an experiment's report, independent of the format: sections of prose, tables and figures.

A section becomes Markdown next to its results, and a part of the HTML report.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Table:
    """Rows of text."""

    caption: str
    headings: tuple[str, ...]
    """A heading that ends in a colon has numbers. `paper` in it marks the paper's numbers, which are shown apart from ours."""
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Figure:
    """A picture; `draw` writes a file in the matplotlib format of its suffix."""

    name: str
    """File name without suffix: letters, digits and dashes."""
    caption: str
    draw: Callable[[Path], None]


@dataclass(frozen=True)
class Section:
    """One experiment. Its command and machine are in its results and are shown by each format."""

    title: str
    parts: tuple[str | Table | Figure, ...]
    """In order. A string is a paragraph; the only markup is `code`."""


@dataclass(frozen=True)
class Goal:
    """A goal of the project, and the finding."""

    what: str
    figure: str
    """The target, such as '>= 2.3x'."""
    where: str
    """Sizes, dtype and device of the finding."""
    found: str
    """The finding with its spread or interval; '' if not measured."""
    met: bool | None
    """None: not measured."""
    kind: Literal["measured", "counted", "modeled"] = "measured"
    remark: str = ""
    """The bottleneck if the goal is not met, or why it could not be measured."""
