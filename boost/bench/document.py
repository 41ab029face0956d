"""What an experiment has to say, apart from how it is shown: sections of prose, tables and figures.

The same section becomes Markdown beside its results and a part of the HTML report.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


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
