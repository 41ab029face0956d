"""Prints results for terminals of any width and for pipes: lines wrap at words, and tables that do not fit become lists."""

import argparse
import sys
import textwrap
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from boost.text import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

LEAST_LAST_COLUMN = 20
"""Minimum width of a table's last column, in characters. Only the last column wraps."""


_TYPES: dict[str, Callable[[str], object]] = {
    **dict.fromkeys(("N", "R", "K", "SEED"), int),
    **dict.fromkeys(("FRACTION", "P", "TEMPERATURE"), float),
    **dict.fromkeys(("FILE", "DIR"), Path),
}
"""Types of options' values, by their names in the help; all others are text."""


def add_options(parser: "argparse._ActionsContainer", options: Mapping[str, str], **defaults: object) -> None:
    """Adds options, each as the help shows it, with its meaning: `--yes` for a flag, `--steps N`, `--device {auto,cpu,cuda}`,
    `--layout NAME [NAME ...]`, or `--prompt TEXT...` if it may be repeated. `defaults`: values of options that are not given, if
    not None or False."""
    for shown, meaning in options.items():
        name, _, value = shown.partition(" ")
        if not value:
            parser.add_argument(name, action="store_true", help=meaning)
        elif value.startswith("{"):
            parser.add_argument(name, choices=tuple(value[1:-1].split(",")), help=meaning)
        elif value.endswith(" ...]"):
            parser.add_argument(name, nargs="+", metavar=value.partition(" ")[0], help=meaning)
        elif value.endswith("..."):
            parser.add_argument(name, action="append", metavar=value[:-3], help=meaning)
        else:
            parser.add_argument(name, metavar=value, type=_TYPES.get(value, str), help=meaning)
    parser.set_defaults(**defaults)


def result_console(piped_width: int) -> "Console":
    """Returns a console as wide as the terminal. For a pipe, it has `piped_width` columns: rich's 80 would wrap long rows."""
    from rich.console import Console

    return Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=piped_width)


def print_fact(console: "Console", key: str, value: str, column: int = 12) -> None:
    """Prints `key`, and `value` starting at `column`: wrapped at words on a terminal, on one line for a pipe."""
    from rich.text import Text

    value = printable(value)
    lines = [value]
    if console.is_terminal:
        lines = textwrap.wrap(value, max(console.width - column, LEAST_LAST_COLUMN), break_on_hyphens=False) or [""]
    for label, line in zip([key, *[""] * len(lines)], lines, strict=False):
        console.print(Text(f"{label:<{column}}{line}"), soft_wrap=True)


def new_table(headings: Sequence[str], right: Collection[str] = ()) -> "Table":
    """Returns a table without rows for `print_table`. `right`: headings of right-aligned columns."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in headings:
        table.add_column(heading, justify="right" if heading in right else "left")
    return table


def print_rows(
    headings: Sequence[str],
    rows: Iterable[Sequence[object]],
    right: Collection[str] = (),
    piped_width: int = 140,
    title: str | None = None,
) -> None:
    """Prints a table on stdout. `right`: headings of right-aligned columns."""
    from rich.text import Text  # keeps a value such as "[red]" from being read as markup

    table = new_table(headings, right)
    table.title, table.title_justify, table.header_style = title, "left", "bold"
    for row in rows:
        table.add_row(*(Text(printable(str(cell), "\n")) for cell in row))
    print_table(result_console(piped_width), table)


def print_table(console: "Console", table: "Table") -> None:
    """Prints a table, wrapping its last column if necessary. If the table still does not fit, prints its rows as a list.

    In the list, each row is a heading (its first cell), then one line per other cell: the name of the column and the value.
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
    from rich.text import Text

    return cell.plain if isinstance(cell, Text) else str(cell)


@contextmanager
def searching(what: str) -> Iterator[Callable[[int, int], None]]:
    """Yields a progress callback (done, total) for a planner search; its bar is on stderr.

    The bar is shown if stderr is a terminal and the search takes longer than a second.
    """
    from rich.console import Console

    from boost.train.progress import make_bar

    terminal = Console(stderr=True)
    bar = make_bar(terminal, transient=True)
    bar.disable = not terminal.is_terminal
    with bar:
        task, begun = bar.add_task(what, total=None, visible=False, stats=""), time.perf_counter()

        def tick(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, visible=time.perf_counter() - begun > 1)

        yield tick
