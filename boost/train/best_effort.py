"""Informational writes: metrics, heartbeats, reports, terminal output. If one fails because a disk is full or a terminal
is closed, the run continues and saves checkpoints as usual.

Every write outside a checkpoint happens in a `best_effort` context, except before the first step. The log has its own
handler (`boost.train.rundir`).
"""

import contextlib
import errno
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

log = logging.getLogger("boost")

_failing: set[str] = set()
"""The writes that failed at the last attempt."""


@contextlib.contextmanager
def best_effort(
    what: str, warn: Callable[[str], None] = log.warning, errors: type[Exception] = Exception
) -> Iterator[None]:
    """Context manager that turns an error into a warning, `cannot {what}`, which is not repeated until a write succeeds. Code
    inside it that communicates may fail only with `errors` that occur on every process."""
    try:
        yield
    except errors as error:
        if what not in _failing:
            _failing.add(what)
            reason = error.strerror if isinstance(error, OSError) and error.strerror else " ".join(str(error).split())
            warn(f"cannot {what}: {reason or type(error).__name__}; training continues")
    else:
        _failing.discard(what)


class _PatientFile(io.FileIO):
    """Standard output or error. Drops text that cannot be written, and all text after the terminal or the reader is gone."""

    def write(self, data: "ReadableBuffer") -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno in (errno.EIO, errno.EPIPE):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self.fileno())
                os.close(null)
            return len(memoryview(data).cast("B"))


@contextlib.contextmanager
def outliving_terminal() -> Iterator[None]:
    """Context manager in which writes to stdout and stderr do not fail."""
    before = sys.stdout, sys.stderr
    try:
        sys.stdout, sys.stderr = (_protected(stream, number) for number, stream in enumerate(before, start=1))
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError, ValueError):  # a script's may be None
                stream.flush()
        sys.stdout, sys.stderr = before


def _protected(stream: TextIO, descriptor: int) -> TextIO:
    try:
        if stream.fileno() != descriptor:
            return stream
    except (AttributeError, OSError, ValueError):  # replaced by something that is not a file
        return stream
    with contextlib.suppress(OSError):
        stream.flush()
    raw = _PatientFile(descriptor, "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw), stream.encoding, stream.errors, line_buffering=bool(stream.line_buffering)
    )
