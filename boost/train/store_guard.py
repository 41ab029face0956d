"""Ends a process that waits for others while the store of its run does not answer: it is in a part of the network that may not go
on, and a request to a store behind a broken wire may block for a quarter of an hour."""

import logging
import sys
import threading
import time
from collections.abc import Callable

from boost.errors import BoostError
from boost.train.worker import leave

log = logging.getLogger("boost")

LOOKS_S = 0.5
"""Seconds between two looks."""


class StoreGuard:
    """Watches from a thread, which never asks the store itself."""

    def __init__(self, where: str, patience_s: float, waits_since: Callable[[], float | None]) -> None:
        """`where`: the store, for people; `patience_s`: how long it may be silent; `waits_since`: since when the main thread waits
        for others, None if it does not."""
        self._where, self._patience_s, self._waits_since = where, patience_s, waits_since
        self._answered = time.monotonic()
        threading.Thread(target=self._watch, name="boost-store-guard", daemon=True).start()

    def answered(self) -> None:
        """The store has answered, some other thread."""
        self._answered = time.monotonic()

    def _watch(self) -> None:
        while not self._is_over(time.monotonic()):
            time.sleep(LOOKS_S)
        text = (
            f"the store of the run at {self._where} has not answered for {self._patience_s:g} s, so this replica cannot know "
            "whether the others go on, and stops"
        )
        log.error(text)
        print(f"boost: error: {text}", file=sys.stderr, flush=True)
        leave(BoostError.exit_code)

    def _is_over(self, now: float) -> bool:
        since = self._waits_since()
        return since is not None and now - max(since, self._answered) > self._patience_s
