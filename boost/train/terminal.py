"""Output that survives a closed terminal: the run saves before it exits, instead of failing to print."""

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator
from typing import Any


class _TerminalFile(io.FileIO):
    """A terminal; writes go to /dev/null once it is closed."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            return len(memoryview(data).cast("B"))


@contextlib.contextmanager
def outliving_terminal() -> Iterator[None]:
    """Context manager in which writes to stdout and stderr do not fail after the terminal was closed."""
    before = sys.stdout, sys.stderr
    try:
        sys.stdout, sys.stderr = (_protected(stream, number) for number, stream in enumerate(before, start=1))
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        sys.stdout, sys.stderr = before


def _protected(stream: Any, descriptor: int) -> Any:
    try:
        is_terminal = stream.fileno() == descriptor and os.isatty(descriptor)
    except (AttributeError, OSError, ValueError):  # replaced by something that is not a file
        return stream
    if not is_terminal:
        return stream
    stream.flush()
    raw = _TerminalFile(descriptor, "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, stream.errors, line_buffering=True)
