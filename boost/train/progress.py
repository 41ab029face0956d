"""Shows the progress of any task: a bar on a terminal, occasional lines elsewhere."""

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn

from boost.format import format_duration
from boost.text import printable

Item = TypeVar("Item")

BAR_MIN_WIDTH = 76
"""Minimum terminal width, in columns, for the bar itself, memory and elapsed time; narrower terminals show only numbers."""

PLAIN_INTERVAL_S = 10.0
"""Seconds between the plain lines of `progress`. A task that takes less time prints nothing."""

live_bars: list[Progress] = []
"""This process's live bar, if any. A terminal can have only one live display, so other bars are added to it."""


def progress(items: Iterable[Item], description: str, enabled: bool = True) -> Iterator[Item]:
    """Yields the items with a progress bar labeled `description`.

    Writes the bar to stderr, because stdout is for results. If the training bar is live, adds the new bar to it.
    Without a terminal, prints a plain line every 10 s. With `enabled` False (on all but the main process), prints nothing.
    """
    total = len(items) if isinstance(items, Sized) else None
    description = printable(description)
    if not enabled:
        yield from items
    elif live_bars:
        yield from _with_bar(live_bars[-1], items, total, description)
    elif (terminal := RichConsole(stderr=True)).is_terminal:
        with make_bar(terminal, transient=True) as bar:
            yield from _with_bar(bar, items, total, description)
    else:
        begun = last = time.monotonic()
        for done, item in enumerate(items, start=1):
            yield item
            now = time.monotonic()
            if now - last >= PLAIN_INTERVAL_S:
                last = now
                of = "" if total is None else f"/{total}"
                line = f"{description} {done}{of}  {_remaining(done, total, now - begun)}".rstrip()
                print(line, file=sys.stderr, flush=True)


def make_bar(rich_console: RichConsole, transient: bool = False) -> Progress:
    """Creates a bar whose tasks have a `stats` field, shown between the count and the elapsed time."""
    narrow = rich_console.width < BAR_MIN_WIDTH
    columns: list[ProgressColumn] = [TextColumn("{task.description}", markup=False), MofNCompleteColumn()]
    columns.append(TextColumn("{task.fields[stats]}", markup=False))
    if not narrow:
        columns = [columns[0], BarColumn(bar_width=None), *columns[1:], TimeElapsedColumn()]
    return Progress(*columns, console=rich_console, expand=not narrow, transient=transient, refresh_per_second=4)


def _with_bar(bar: Progress, items: Iterable[Item], total: int | None, description: str) -> Iterator[Item]:
    task = bar.add_task(description, total=total, stats="")
    begun = time.monotonic()
    try:
        for done, item in enumerate(items, start=1):
            yield item
            bar.update(task, completed=done, stats=_remaining(done, total, time.monotonic() - begun))
    finally:
        bar.remove_task(task)


def _remaining(done: int, total: int | None, elapsed: float) -> str:
    return "" if total is None else f"eta {format_duration(elapsed / done * (total - done))}"
