"""Results on a terminal of any width, and on a pipe: lines that fold at words, tables that become lists before they lose a cell."""

import sys
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

LEAST_LAST_COLUMN = 20
"""Characters that the last column of a table keeps; it folds, the others do not."""


def result_console(piped_width: int) -> "Console":
    """A console as wide as the terminal; `piped_width` columns for a pipe, where 80 would fold the rows of large models."""
    from rich.console import Console

    return Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=piped_width)


def print_fact(console: "Console", key: str, value: str, column: int = 12) -> None:
    """Prints `key` and, from `column` on, `value`: folded at words on a terminal, one line for a pipe."""
    from rich.text import Text

    lines = [value]
    if console.is_terminal:
        lines = textwrap.wrap(value, max(console.width - column, LEAST_LAST_COLUMN), break_on_hyphens=False) or [""]
    for label, line in zip([key, *[""] * len(lines)], lines, strict=False):
        console.print(Text(f"{label:<{column}}{line}"), soft_wrap=True)


def print_table(console: "Console", table: "Table") -> None:
    """Prints a table, its last column folded if need be; where that does not fit either, a list of its rows.

    A list has the first cell of each row as a heading, then a line for each other cell: the name of the column and the value.
    """
    *fixed, _ = table.columns
    widths = [
        max([console.measure(cell).maximum for cell in (column.header, *column.cells)]) for column in table.columns
    ]
    capped = [min(width, column.max_width or width) for width, column in zip(widths, fixed, strict=False)]
    if sum(capped) + 2 * len(fixed) + min(widths[-1], LEAST_LAST_COLUMN) <= console.width:
        for column in fixed:
            column.no_wrap = column.no_wrap or column.max_width is None
        console.print(table)
        return
    if table.title:
        console.print(table.title)
    names = [str(column.header) for column in table.columns]
    indent = max(map(len, names[1:])) + 4
    for cells in zip(*(column.cells for column in table.columns), strict=True):
        print_fact(console, "", _plain(cells[0]), 0)
        for name, cell in zip(names[1:], cells[1:], strict=True):
            for number, line in enumerate(_plain(cell).splitlines()):
                print_fact(console, f"  {name}" if number == 0 else "", line, indent)


def _plain(cell: object) -> str:
    """The text of a cell, without its style."""
    from rich.text import Text

    return cell.plain if isinstance(cell, Text) else str(cell)
