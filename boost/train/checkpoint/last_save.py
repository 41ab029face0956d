"""The last save of a run. If it fails, the weights are lost, so it retries and falls back to another folder."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from boost.errors import StorageError
from boost.train.checkpoint.write import SavedCheckpoint

FIRST_WAIT_S, LONGEST_WAIT_S = 5.0, 60.0


def save_with_retries(
    save: Callable[[Path], SavedCheckpoint],
    folder: Path,
    fallback: Path | None,
    minutes: float,
    urgent: bool,
    warn: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> SavedCheckpoint:
    """Saves to `folder`. If that fails, retries for `minutes` with one warning per attempt, then saves to `fallback`.

    `urgent`: the process may be killed soon, so `fallback` is tried before the retries. The schedule counts waits, not time, so
    that all processes follow it without communication. Raises StorageError if everything failed.
    """
    try:
        return save(folder)
    except StorageError as error:
        last = error
    waits = list(retry_waits(minutes))
    if urgent and fallback and (saved := _save_elsewhere(save, fallback, last, warn)):
        return saved
    for attempt, wait in enumerate(waits, start=1):
        warn(
            f"{last}; free disk space: attempt {attempt} of {len(waits)} in {wait:.0f} s (run.save_retry_minutes = {minutes:g})"
        )
        sleep(wait)
        try:
            return save(folder)
        except StorageError as error:
            last = error
    if not urgent and fallback and (saved := _save_elsewhere(save, fallback, last, warn)):
        return saved
    raise last


def retry_waits(minutes: float) -> Iterator[float]:
    """Seconds before each retry: doubles up to one minute, `minutes` in total."""
    left, wait = 60 * minutes, FIRST_WAIT_S
    while left > 0:
        yield min(wait, left)
        left -= wait
        wait = min(2 * wait, LONGEST_WAIT_S)


def _save_elsewhere(
    save: Callable[[Path], SavedCheckpoint], fallback: Path, reason: StorageError, warn: Callable[[str], None]
) -> SavedCheckpoint | None:
    warn(f"{reason}; saving in '{fallback}' (run.fallback_dir)")
    try:
        return save(fallback)
    except StorageError as error:
        warn(str(error))
        return None
