"""What an experiment has to say, apart from how it is shown: sections of prose, tables and figures.

The same section becomes Markdown beside its results and a part of the HTML report.
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
    """One that ends in a colon is of numbers. `paper` in it: what the paper has, shown apart from ours."""
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Figure:
    """A picture, drawn into a file of any format that matplotlib knows by its suffix."""

    name: str
    """Of the file, without a suffix: letters, digits and dashes."""
    caption: str
    draw: Callable[[Path], None]


@dataclass(frozen=True)
class Section:
    """One experiment. Its command and machine stand in its results and are said by whatever shows it."""

    title: str
    parts: tuple[str | Table | Figure, ...]
    """In order. A string is a paragraph; in it `code` and nothing else of Markdown."""


@dataclass(frozen=True)
class Goal:
    """A figure that the project is held to, and what was found."""

    what: str
    figure: str
    """To be reached, as '>= 2.3x'."""
    where: str
    """Sizes, dtype, device of what was found."""
    found: str
    """With its spread or interval; '' if it could not be measured."""
    met: bool | None
    """None: not measured."""
    kind: Literal["measured", "counted", "modelled"] = "measured"
    remark: str = ""
    """What the limit is, if it was not met, or why it could not be measured."""
