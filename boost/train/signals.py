"""Stop signals as a flag that the training loop reads between steps: SIGTERM saves and exits."""

import signal
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""Sent by schedulers, spot instances and users at a terminal."""

SECOND_INTERRUPT_S = 2.0
"""Two SIGINTs within this time are one Ctrl-C: a terminal sends it to every process, and a launcher forwards it."""


class StopRequest:
    """While open, stop signals only set a flag; a second SIGINT more than 2 s after the first raises KeyboardInterrupt.

    Previous handlers are restored on exit; after a SIGINT, once those 2 s are over. Must be entered on
    the main thread, as Python requires for handlers.
    """

    def __init__(self) -> None:
        self.requested: bool = False
        """Whether a stop signal has arrived."""
        self.name: str | None = None
        """Name of the first one, such as 'SIGTERM'."""
        self._interrupted_at: float | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        for number in STOP_SIGNALS:
            self._previous[number] = signal.signal(number, self._record)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            # None: a handler installed by C code, which Python cannot restore.
            previous = signal.SIG_DFL if handler is None else handler
            signal.signal(
                number, self._ignore_repeat(previous) if number == signal.SIGINT and self._interrupted_at else previous
            )
        self._previous.clear()

    def _ignore_repeat(self, previous: Any) -> Callable[[int, FrameType | None], None]:
        """The previous handler, except that it ignores what a launcher still forwards of a Ctrl-C already handled."""

        def handle(number: int, frame: FrameType | None) -> None:
            if self._interrupted_at is not None and time.monotonic() - self._interrupted_at <= SECOND_INTERRUPT_S:
                return
            signal.signal(number, previous)
            signal.raise_signal(number)

        return handle

    def _record(self, number: int, frame: FrameType | None) -> None:
        if not self.requested:
            self.requested, self.name = True, signal.Signals(number).name
        if number != signal.SIGINT:
            return
        now = time.monotonic()
        if self._interrupted_at is None:
            self._interrupted_at = now
        elif now - self._interrupted_at > SECOND_INTERRUPT_S:
            raise KeyboardInterrupt
