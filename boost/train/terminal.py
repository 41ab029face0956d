"""Output that cannot end a run: a closed terminal or pipe, or a full disk, loses text instead of failing to print."""

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator
from typing import Any


class _PatientFile(io.FileIO):
    """Standard output or error. Text that cannot be written is dropped; once the terminal or the reader is gone, all of it."""

    def write(self, data: Any) -> int:
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
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        sys.stdout, sys.stderr = before


def _protected(stream: Any, descriptor: int) -> Any:
    try:
        if stream.fileno() != descriptor:
            return stream
    except (AttributeError, OSError, ValueError):  # replaced by something that is not a file
        return stream
    with contextlib.suppress(OSError):
        stream.flush()
    raw = _PatientFile(descriptor, "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw), stream.encoding, stream.errors, line_buffering=stream.line_buffering
    )
