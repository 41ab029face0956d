"""Takeover of the main process's terminal and lock by its successor (run.recovery = "in-step")."""

import logging
import time
from typing import TYPE_CHECKING

from boost.errors import ConfigError, StorageError
from boost.train.hooks import Hook
from boost.train.run_lock import RunLock
from boost.train.worker import take_terminal

if TYPE_CHECKING:
    from boost.train.loop import Trainer

log = logging.getLogger("boost")

LOCK_S = 5.0
"""Time for the previous main process to release the run directory, seconds. Its launcher ends it once it is excluded."""


class TakeOver(Hook):
    """Takes over the terminal and the lock of the run directory. The first main process already has both."""

    main_only = True

    def __init__(self) -> None:
        self._lock: RunLock | None = None

    def setup(self, trainer: "Trainer") -> None:
        if trainer.recovery is None or trainer.recovery.decision.number == 0:
            return
        take_terminal()
        deadline = time.monotonic() + LOCK_S
        while self._lock is None:
            lock = RunLock(trainer.config.run.dir)
            try:
                self._lock = lock.__enter__()
            except (ConfigError, StorageError) as error:  # the previous main process hangs and has not been ended yet
                if isinstance(error, StorageError) or time.monotonic() > deadline:
                    log.warning("%s; training continues without the lock", error)
                    return
                time.sleep(0.2)

    def teardown(self, trainer: "Trainer") -> None:
        if self._lock is not None:
            self._lock.__exit__(None, None, None)
            self._lock = None
