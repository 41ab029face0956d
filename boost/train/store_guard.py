"""Ends a process that waits for others while the run's store is not responding.

Such a process is in a network partition that must not continue training. A request to a store behind a broken link may block for 15
minutes, so the process cannot rely on an error."""

import logging
import sys
import threading
import time
from collections.abc import Callable

from boost.errors import BoostError
from boost.train.worker import leave

log = logging.getLogger("boost")

LOOKS_S = 0.5
"""Interval between checks, seconds."""


class StoreGuard:
    """Checks from a thread that never accesses the store itself."""

    def __init__(self, where: str, patience_s: float, waits_since: Callable[[], float | None]) -> None:
        """`where`: address of the store, for messages. `patience_s`: how long the store may be silent, seconds. `waits_since`:
        returns when the main thread started waiting for others, None if it is not waiting."""
        self._where, self._patience_s, self._waits_since = where, patience_s, waits_since
        self._answered = time.monotonic()
        threading.Thread(target=self._watch, name="boost-store-guard", daemon=True).start()

    def answered(self) -> None:
        """Call when the store has answered a request of another thread."""
        self._answered = time.monotonic()

    def _watch(self) -> None:
        while not self._is_over(time.monotonic()):
            time.sleep(LOOKS_S)
        text = (
            f"the run's store at {self._where} has not responded for {self._patience_s:g} s: this replica cannot tell whether the "
            "others continue, so it stops"
        )
        log.error(text)
        print(f"boost: error: {text}", file=sys.stderr, flush=True)
        leave(BoostError.exit_code)

    def _is_over(self, now: float) -> bool:
        since = self._waits_since()
        return since is not None and now - max(since, self._answered) > self._patience_s
