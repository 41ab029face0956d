"""Makes a process's reads fail, as a network file system does: once, or for good, at any open, listing or status of a file.

with failing(folder, number=7, error=errno.EIO):  # the eighth read below `folder` fails
    ...
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import safetensors


@dataclass
class Reads:
    """Reads below a folder, counted."""

    folder: str
    number: int | None
    """The read that fails; None: none."""
    error: int
    forever: bool
    """Whether later reads of the same path fail, too."""
    seen: list[str] = field(default_factory=list)
    broken: str | None = None

    def read(self, path: Any) -> None:
        """Counts a read. Raises OSError if it is to fail."""
        if not isinstance(path, str | os.PathLike) or not str(path).startswith(self.folder):
            return
        self.seen.append(str(path))
        if len(self.seen) - 1 == self.number:
            self.broken = str(path)
        elif not (self.forever and str(path) == self.broken):
            return
        raise OSError(self.error, os.strerror(self.error), str(path))


_active: list[Reads] = []


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    # An audit hook cannot be removed.
    if _active and event in ("open", "os.listdir", "os.scandir"):
        mode = arguments[1] if event == "open" else "r"
        if mode is None or not set(str(mode)) & set("wax+"):
            _active[0].read(arguments[0])


@contextlib.contextmanager
def failing(folder: Path, number: int | None, error: int = 5, forever: bool = False) -> Iterator[Reads]:
    """Makes read `number` below `folder` fail in this process. Yields the reads, for counting."""
    if _hook not in _installed:
        sys.addaudithook(_hook)
        _installed.append(_hook)
    reads = Reads(str(folder), number, error, forever)
    stat, safe_open = os.stat, safetensors.safe_open

    def reading(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any = None, *arguments: Any, **words: Any) -> Any:
            reads.read(path if path is not None else words.get("filename"))
            return function(path, *arguments, **words) if path is not None else function(*arguments, **words)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "stat", reading(stat))
        patch.setattr(safetensors, "safe_open", reading(safe_open))
        _active.append(reads)
        try:
            yield reads
        finally:
            _active.pop()


_installed: list[Callable[..., None]] = []
