"""Turns signals into flags that the training loop reads. A stop signal makes it save and exit; SIGUSR2 makes it save and continue.

This module does not import torch, so that a command can catch signals before slow imports. `StopRequest` can be nested: a command
opens it before its imports, and the trainer opens it again around its steps.
"""

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import ClassVar, TypeVar

from boost.errors import StoppedError

Item = TypeVar("Item")

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
"""Sent by schedulers, on spot preemption, when a terminal closes, or by Ctrl-C."""

SAVE_SIGNAL = signal.SIGUSR2
"""Requests a checkpoint after the current step; training continues."""

SECOND_INTERRUPT_S = 2.0
"""Two SIGINTs within this time count as one Ctrl-C, because the terminal sends it to every process and the launcher forwards it."""

INTERRUPTED = b"\nstopping after this step; press Ctrl-C again to abort\n"
"""Printed immediately at the first Ctrl-C."""


def caught_signals() -> tuple[signal.Signals, ...]:
    """The stop signals and the save signal, except SIGHUP if it is ignored (nohup)."""
    signals = (*STOP_SIGNALS, SAVE_SIGNAL)
    return tuple(number for number in signals if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN)


Handler = Callable[[int, FrameType | None], object] | int | None
"""What `signal.getsignal` returns."""


class StopRequest:
    """Context manager in which stop signals only set a flag. A second SIGINT more than 2 s after the first raises
    KeyboardInterrupt. Inside another one, it yields the outer one.

    Pending signals are delivered as soon as the handlers are installed. On exit, restores previous handlers and signal mask (after
    a SIGINT, its handler only when the 2 s are over). It catches signals only on the main thread, as Python requires.
    """

    announces: ClassVar[bool] = True
    """Whether this process prints a message on Ctrl-C. The launcher prints it for the processes that it started."""

    _open: ClassVar["StopRequest | None"] = None

    def __init__(self) -> None:
        self.requested: bool = False
        """Whether a stop signal has arrived."""
        self.name: str | None = None
        """Name of the first stop signal, such as 'SIGTERM'."""
        self._save_requested = False
        self._interrupted_at: float | None = None
        self._previous: dict[signal.Signals, Handler] = {}
        self._mask: set[int | signal.Signals] = set()

    @classmethod
    def begin_process(cls) -> None:
        """Call this at the start of a launched process. The launcher prints messages for it, and the launcher's open
        StopRequest, which a forked process inherits, does not apply to it."""
        cls.announces, cls._open = False, None

    @classmethod
    def require_none(cls) -> None:
        """Raises StoppedError if the open StopRequest has caught a stop signal."""
        if cls._open is not None and cls._open.requested:
            raise StoppedError(cls._open.name)

    def __enter__(self) -> "StopRequest":
        request, caught = StopRequest._open or self, caught_signals()
        if threading.current_thread() is not threading.main_thread():
            return request
        # Inside another one, too: a hook or a library may have installed its own handlers in between.
        previous = {number: signal.signal(number, request._record) for number in caught}
        mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, caught)
        if request is self:
            self._previous, self._mask, StopRequest._open = previous, mask, self
        return request

    def __exit__(self, *_: object) -> None:
        if StopRequest._open is not self:
            return
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        for number, handler in self._previous.items():
            # None: a handler installed by C code, which Python cannot restore.
            previous = signal.SIG_DFL if handler is None else handler
            repeats = number == signal.SIGINT and self._interrupted_at
            signal.signal(number, self._ignore_repeat(previous) if repeats else previous)
        self._previous.clear()
        StopRequest._open = None

    def take_save_request(self) -> bool:
        """Whether SIGUSR2 has arrived since the last call."""
        requested, self._save_requested = self._save_requested, False
        return requested

    def _ignore_repeat(self, previous: Handler) -> Callable[[int, FrameType | None], None]:
        """Wraps the previous handler to ignore further SIGINTs that a launcher forwards for the same Ctrl-C."""

        def handle(number: int, frame: FrameType | None) -> None:
            if self._interrupted_at is not None and time.monotonic() - self._interrupted_at <= SECOND_INTERRUPT_S:
                return
            signal.signal(number, previous)
            signal.raise_signal(number)

        return handle

    def _record(self, number: int, frame: FrameType | None) -> None:
        if number == SAVE_SIGNAL:
            self._save_requested = True
            return
        if number == signal.SIGHUP:
            mute_closed_streams()
        if not self.requested:
            self.requested, self.name = True, signal.Signals(number).name
        if number != signal.SIGINT:
            return
        now = time.monotonic()
        if self._interrupted_at is None:
            self._interrupted_at = now
            if self.announces and os.environ.get("RANK", "0") == "0":
                answer_interrupt()
        elif now - self._interrupted_at > SECOND_INTERRUPT_S:
            raise KeyboardInterrupt


def until_stopped(items: Iterable[Item]) -> Iterator[Item]:
    """Yields the items. Raises StoppedError as soon as the open StopRequest has caught a stop signal."""
    for item in items:
        StopRequest.require_none()
        yield item


def answer_interrupt() -> None:
    """Prints the message for Ctrl-C. Bypasses Python's streams, which may be in use when the signal arrives."""
    with contextlib.suppress(OSError):
        os.write(2, INTERRUPTED)


def mute_closed_streams() -> None:
    """Redirects stdout and stderr to /dev/null if their terminal or pipe is gone; otherwise every write would fail."""
    for descriptor in (1, 2):
        poll = select.poll()
        poll.register(descriptor, 0)
        if any(event & (select.POLLHUP | select.POLLERR) for _, event in poll.poll(0)):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, descriptor)
            os.close(null)
