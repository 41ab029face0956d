"""Writes that only inform: metrics, heartbeats, reports. If one fails, because a disk is full, the run goes on and saves as usual.

Whatever a process of a run writes outside of a checkpoint is in such a context, unless it is written before the first step.
Standard output and error are covered by `boost.train.terminal`, the log by its handler (`boost.train.rundir`).
"""

import contextlib
import logging
from collections.abc import Callable, Iterator

log = logging.getLogger("boost")

_failing: set[str] = set()
"""What could not be written the last time."""


@contextlib.contextmanager
def best_effort(
    what: str, warn: Callable[[str], None] = log.warning, errors: type[Exception] = Exception
) -> Iterator[None]:
    """Context manager: errors only cause a warning, `cannot {what}`, and only the first one until it works again. Code inside that
    communicates may only fail with `errors` if it does on every process."""
    try:
        yield
    except errors as error:
        if what not in _failing:
            _failing.add(what)
            reason = error.strerror if isinstance(error, OSError) and error.strerror else " ".join(str(error).split())
            warn(f"cannot {what}: {reason or type(error).__name__}; training continues")
    else:
        _failing.discard(what)
