"""Ends a process whose request to a store or a rendezvous is never answered.

Such a request blocks for 15 minutes if the network line is cut, and forever if the server is stopped. Neither exceptions nor signal
handlers interrupt it, so a thread that sends no requests keeps the time.
"""

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

from boost.errors import TrainingError
from boost.text import print_error

log = logging.getLogger("boost")

LOOK_S = 0.5
"""Interval between the checks, in seconds."""
PAUSE_S = 3.0
"""A longer interval means that this process was suspended, perhaps with all others: the limits start again."""
MARGIN_S = 10.0
"""How much longer than a limit that is checked between requests the requests themselves may block, in seconds."""

Waits = Callable[[], tuple[float, float] | None]
"""Returns when a wait began (time.monotonic) and its limit in seconds; None if the process is not waiting."""


def end_overdue(over: threading.Event, waits: Waits, end: Callable[[], object]) -> None:
    """Starts a thread that calls `end`, to end the process, when a wait exceeds its limit. The thread stops when `over` is set."""
    threading.Thread(target=_watch, args=(over, waits, end), name="boost-overdue", daemon=True).start()


def _watch(over: threading.Event, waits: Waits, end: Callable[[], object]) -> None:
    looked = resumed = time.monotonic()
    while not over.wait(LOOK_S):
        now = time.monotonic()
        if now - looked > PAUSE_S:
            resumed = now
        looked = now
        if (wait := waits()) and now - max(wait[0], resumed) > wait[1] and not over.is_set():
            end()
            return


@contextlib.contextmanager
def time_limit(seconds: float, text: str) -> Iterator[None]:
    """Context manager that ends the process with the error `text` and code 3 if the block takes longer."""
    over, begun = threading.Event(), time.monotonic()
    end_overdue(over, lambda: (begun, seconds), lambda: end_process(text))
    try:
        yield
    finally:
        over.set()


def end_process(text: str, code: int = TrainingError.exit_code) -> NoReturn:
    """Logs and prints an error, and ends the process from any thread."""
    if log.handlers:
        log.error("%s", text)
    print_error(text)
    leave(code)


def leave(code: int) -> NoReturn:
    """Exits without interpreter shutdown, which can hang indefinitely on a broken process group."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # a script's may be None
            stream.flush()
    os._exit(code)
