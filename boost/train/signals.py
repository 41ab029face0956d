"""A request to stop, as a flag that the loop reads between two steps: SIGTERM saves and leaves."""

import signal
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""What schedulers, spot instances and people at a terminal send."""

SECOND_INTERRUPT_S = 2.0
"""Two SIGINTs closer than this are one Ctrl-C: a terminal sends it to every process, and a launcher sends it on."""


class StopRequest:
    """While open, stop signals only set a flag; a second SIGINT more than 2 s after the first raises KeyboardInterrupt.

    Handlers of before come back on exit; after a SIGINT, once those 2 s are over. Must be opened on
    the main thread (Python's rule for handlers).
    """

    def __init__(self) -> None:
        self.requested: bool = False
        """Whether a stop signal has come."""
        self.name: str | None = None
        """Name of the first one, such as 'SIGTERM'."""
        self._interrupted_at: float | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        for number in STOP_SIGNALS:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # None is a handler that C code installed: Python cannot put it back.
            before = signal.SIG_DFL if handler is None else handler
            signal.signal(number, self._late(before) if number == signal.SIGINT and self._interrupted_at else before)
        self._before.clear()

    def _late(self, before: Any) -> Callable[[int, FrameType | None], None]:
        """The handler of before, but deaf to what a launcher still sends on of a Ctrl-C that has been heeded already."""

        def handle(number: int, frame: FrameType | None) -> None:
            if self._interrupted_at is not None and time.monotonic() - self._interrupted_at <= SECOND_INTERRUPT_S:
                return
            signal.signal(number, before)
            signal.raise_signal(number)

        return handle

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.requested:
            self.requested, self.name = True, signal.Signals(number).name
        if number != signal.SIGINT:
            return
        now = time.monotonic()
        if self._interrupted_at is None:
            self._interrupted_at = now
        elif now - self._interrupted_at > SECOND_INTERRUPT_S:
            raise KeyboardInterrupt
