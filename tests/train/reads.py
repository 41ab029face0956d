"""Makes a process's reads fail, as a network file system does: once, or for good, at any open, listing or status of a file.

with failing(folder, number=7, error=errno.EIO):  # the eighth read below `folder` fails
    ...
with watched(see):  # see("open" | "write" | "stat" | "lstat" | "read", path) is called first, and may raise OSError
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

    def see(self, call: str, path: str) -> None:
        """Counts a read. Raises OSError if it is to fail."""
        if call not in ("open", "stat") or not path.startswith(self.folder):
            return
        self.seen.append(path)
        if len(self.seen) - 1 == self.number:
            self.broken = path
        elif not (self.forever and path == self.broken):
            return
        raise OSError(self.error, os.strerror(self.error), path)


_active: list[Callable[[str, str], None]] = []


def _see(call: str, path: Any) -> None:
    if isinstance(path, str | os.PathLike):
        _active[0](call, str(path))


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    # An audit hook cannot be removed.
    if _active and event in ("open", "os.listdir", "os.scandir"):
        mode = arguments[1] if event == "open" else "r"
        _see("write" if mode is not None and set(str(mode)) & set("wax+") else "open", arguments[0])


@contextlib.contextmanager
def failing(folder: Path, number: int | None, error: int = 5, forever: bool = False) -> Iterator[Reads]:
    """Makes read `number` below `folder` fail in this process. Yields the reads, for counting."""
    reads = Reads(str(folder), number, error, forever)
    with watched(reads.see):
        yield reads


@contextlib.contextmanager
def watched(see: Callable[[str, str], None]) -> Iterator[None]:
    """Calls `see` before this process opens, lists, reads or looks for a file."""
    if _hook not in _installed:
        sys.addaudithook(_hook)
        _installed.append(_hook)

    def seen(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any = None, *arguments: Any, **words: Any) -> Any:
            place = words.get("filename") if path is None else path
            _see(kind, os.readlink(f"/proc/self/fd/{place}") if kind == "read" and isinstance(place, int) else place)
            return function(path, *arguments, **words) if path is not None else function(*arguments, **words)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for owner, name, kind in (
            *((os, "stat", "stat"), (os, "lstat", "lstat"), (os, "pread", "read")),
            *((Path, "read_text", "read"), (Path, "read_bytes", "read"), (safetensors, "safe_open", "open")),
        ):
            patch.setattr(owner, name, seen(kind, getattr(owner, name)))
        _active.append(see)
        try:
            yield
        finally:
            _active.pop()


_installed: list[Callable[..., None]] = []
