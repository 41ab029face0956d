"""Slow replicas: a replica that keeps the others waiting is reported and, with run.exclude_slow, excluded and restarted."""

import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from boost.parallel.membership import Decision, Member
from boost.train.heartbeat import Beat
from boost.train.hooks import Hook, MembershipChange, StepEnd

if TYPE_CHECKING:
    from boost.train.loop import Trainer

TIMES = 3.0
"""A replica is slow if its micro-batches take this many times the median of the other replicas."""
LOOK_S = 1.0
"""Interval between checks, seconds; heartbeats are not more frequent."""


class SlowReplicas(Hook):
    """Compares the seconds per micro-batch of replicas, which every process publishes in its heartbeats."""

    main_only = True

    def __init__(self, steps: int, exclude: bool) -> None:
        """`steps`: consecutive steps after which a slow replica is reported (0: never). `exclude`: whether it is also excluded."""
        self._steps, self._exclude = steps, exclude
        self._since: dict[Member, int] = {}
        self._reported: set[Member] = set()
        self._looked_at = 0.0

    def on_membership(self, trainer: "Trainer", event: MembershipChange) -> None:
        self._since = {}

    def after_step(self, trainer: "Trainer", event: StepEnd) -> None:
        now = time.monotonic()
        if trainer.recovery is None or not self._steps or now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        slow = slow_members(trainer.recovery.decision, trainer.recovery.beats())
        self._since = {member: self._since.get(member, event.metrics.step) for member in slow}
        for member, since in self._since.items():
            if event.metrics.step - since < self._steps or member in self._reported:
                continue
            self._reported.add(member)
            text = f"{slow[member]:.1f} times as long as the others for {event.metrics.step - since} steps"
            action = "it is excluded and restarted" if self._exclude else "check the load of its machine"
            trainer.warn(f"replica {member.replica} takes {text}; {action}")
            if self._exclude:
                trainer.recovery.exclude_slow(member, text)


def slow_members(decision: Decision, beats: Sequence[Beat]) -> dict[Member, float]:
    """The slow members, with their seconds per micro-batch divided by the median of the others."""
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
