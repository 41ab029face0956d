"""Hooks for in-step recovery: taking over as main process, reporting slow replicas, and the membership change event."""

import contextlib
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from boost.elastic.membership import Decision, Member
from boost.errors import StorageError
from boost.train.events import RunEvent, StepEnd
from boost.train.heartbeat import Beat
from boost.train.hooks import Hook
from boost.train.loop import Trainer
from boost.train.run_lock import RunLock
from boost.train.worker import take_terminal

log = logging.getLogger("boost")

TIMES = 3.0
"""A replica is slow if its micro-batches take this many times as long as the other replicas' median."""
LOOK_S = 1.0
"""Interval between checks, in seconds; heartbeats are no more frequent."""


@dataclass(frozen=True)
class MembershipChange(RunEvent):
    """A replica was lost or rejoined."""

    kind = "membership"
    replicas: int
    """Number of replicas after the change."""
    of: int
    """parallel.dp: number of replicas in a full run."""
    lost: tuple[tuple[int, str], ...]
    """(index, reason) of each lost replica."""
    joined: tuple[int, ...]
    """Indices of the replicas that rejoined."""
    seconds: float
    """Time from detection on this process until all processes were connected."""

    def line(self) -> str:
        gone = [f"lost replica {replica} ({why})" for replica, why in self.lost]
        back = [f"replica {replica} rejoined" for replica in self.joined]
        what = "; ".join(gone + back) or "replicas reconnected"
        return (
            f"{what}: step {self.step} continues with {self.replicas} of {self.of} replicas after {self.seconds:.2f} s"
        )

    def numbers(self) -> dict[str, float]:
        return {"replicas": self.replicas}


class TakeOver(Hook):
    """Takes over the terminal and the lock on the run directory. The first main process already has both."""

    main_only = True

    def __init__(self) -> None:
        self._lock = contextlib.ExitStack()

    def setup(self, trainer: Trainer) -> None:
        if not trainer.takes_over:
            return
        take_terminal()
        lock = trainer.run.lock = RunLock(trainer.run.path, trainer.run.token)
        try:
            self._lock.enter_context(lock)
        except StorageError as error:  # saves ask again whether this run still owns the directory
            log.warning("%s; training continues without the lock on the run directory", error)

    def teardown(self, trainer: Trainer) -> None:
        self._lock.close()


class SlowReplicas(Hook):
    """Compares the replicas' seconds per micro-batch, which every process publishes in its heartbeats."""

    main_only = True

    def __init__(
        self,
        steps: int,
        look: Callable[[], tuple[Decision, Sequence[Beat]]],
        exclude: Callable[[Member, str], None] | None,
    ) -> None:
        """`steps`: slow steps in a row after which a replica is reported (0: never). `look` returns the current membership and
        the latest heartbeats. `exclude`: excludes a slow replica, for the given reason; None: slow replicas are only reported."""
        self._steps, self._look, self._exclude = steps, look, exclude
        self._since: dict[Member, int] = {}
        self._reported: set[Member] = set()
        self._looked_at = 0.0

    def on_event(self, trainer: Trainer, event: RunEvent) -> None:
        self._since = {}

    def after_step(self, trainer: Trainer, event: StepEnd) -> None:
        now = time.monotonic()
        if not self._steps or now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        slow = slow_members(*self._look())
        self._since = {member: self._since.get(member, event.metrics.step) for member in slow}
        for member, since in self._since.items():
            if event.metrics.step - since < self._steps or member in self._reported:
                continue
            self._reported.add(member)
            text = f"{slow[member]:.1f} times as long as the other replicas for {event.metrics.step - since} steps"
            action = "it will be excluded and restarted" if self._exclude else "check the load on its machine"
            trainer.warn(f"replica {member.replica} has taken {text}; {action}")
            if self._exclude:
                self._exclude(member, text)


def slow_members(decision: Decision, beats: Sequence[Beat]) -> dict[Member, float]:
    """The slow members, each with its seconds per micro-batch divided by the median for the other members."""
    pace = {
        member: max((beat.pace for beat in beats if beat.incarnation == member.incarnation), default=0.0)
        for member in decision.members
    }
    found = {}
    for member, own in pace.items():
        others = [each for other, each in pace.items() if other != member and each > 0]
        if others and own > TIMES * statistics.median(others):
            found[member] = own / statistics.median(others)
    return found
