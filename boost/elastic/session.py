"""How one process takes part in a run with in-step recovery: the trainer's parts that replicas may leave and join."""

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from boost.config import Config
from boost.elastic.hooks import SlowReplicas, TakeOver
from boost.elastic.recovery import Recovery
from boost.elastic.step import RecoverableStepper
from boost.parallel.gradients import StepFlags
from boost.train.builtin_hooks import builtin_hooks
from boost.train.events import StepEnd
from boost.train.faults import WAIT_S, Fault, FaultInjection
from boost.train.heartbeat import Heartbeat
from boost.train.hooks import Hook
from boost.train.loop import Trainer
from boost.train.rendezvous import Stopped
from boost.train.run import Session
from boost.train.rundir import RunDirectory


class ElasticSession(Session):
    """A run that survives the loss of a replica."""

    def __init__(self, config: Config, stopped: Stopped) -> None:
        """Joins the replica and, unless it is a restart, the first membership. Raises the same errors as `Recovery`."""
        self.config, self.recovery = config, Recovery(config, stopped)
        self.mesh, self.rejoins = self.recovery.mesh, self.recovery.is_restart
        self.rank = self.recovery.slot
        """Rank in the full run; membership changes do not affect it."""

    @property
    def is_over(self) -> bool:
        return self.recovery.is_over

    def heartbeat(self, on_hang: Callable[[str], None]) -> Heartbeat:
        slot = replace(self.mesh, rank=self.recovery.slot, size=self.recovery.slots)
        return Heartbeat(slot, self.config.run, on_hang, self.recovery.store, self.recovery.member.incarnation)

    def faults(self, faults: Sequence[Fault]) -> Hook:
        return FaultInjection(list(faults), self._wait_for_newcomer)

    def _wait_for_newcomer(self) -> None:
        """Returns once a lost replica asks to rejoin, immediately if none is missing, and after at most WAIT_S seconds."""
        until = time.monotonic() + WAIT_S
        recovery, dp = self.recovery, self.config.parallel.dp
        while len(recovery.decision.members) < dp and not recovery.has_waiting() and time.monotonic() < until:
            time.sleep(0.02)

    def trainer(self, run: RunDirectory, hooks: Sequence[Hook]) -> Trainer:
        config, recovery = self.config, self.recovery
        exclude = recovery.exclude_slow if config.run.exclude_slow else None
        watch = SlowReplicas(config.run.slow_steps, lambda: (recovery.decision, recovery.beats), exclude)
        ordered = [TakeOver(), *hooks, watch, *builtin_hooks(config), Admission(recovery)]
        return Trainer(config, self.mesh, run, ordered, functools.partial(RecoverableStepper, recovery))

    def start(self, trainer: Trainer, candidates: list[Path], start_from: str | None) -> None:
        """Loads the initial state; a restarted replica receives the current state from the others."""
        if self.recovery.is_restart:
            self.recovery.enter(trainer)
        else:
            trainer.start(candidates, start_from)
            self.recovery.trainer = trainer  # after this, a lost replica does not end the run

    def failed(self, error: Exception) -> None:
        self.recovery.failed(error)

    def close(self) -> None:
        self.recovery.close()
        super().close()


class Admission(Hook):
    """Admits waiting replicas between two steps. The last hook, because all others act on the step before."""

    def __init__(self, recovery: Recovery) -> None:
        self._recovery = recovery

    def on_train_start(self, trainer: Trainer) -> None:
        self._recovery.on_train_start(trainer)

    def after_backward(self, trainer: Trainer) -> None:
        if self._recovery.has_waiting():
            trainer.requested |= StepFlags.JOIN

    def after_step(self, trainer: Trainer, event: StepEnd) -> None:
        while self._recovery.warnings:
            trainer.warn(self._recovery.warnings.pop(0))
        rolls_back = trainer.judge.rollback_reason is not None  # they are still waiting after the next step
        if event.joins and not (event.last or event.stopping or rolls_back):
            self._recovery.admit()
