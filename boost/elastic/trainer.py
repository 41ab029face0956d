"""The trainer of a run with in-step recovery: replicas are lost and rejoin while it trains (docs/recovery.md)."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from boost.elastic.gradients import ElasticReducer
from boost.elastic.hooks import MembershipChange, SlowReplicas, TakeOver
from boost.elastic.optimizer import DividedAdamW, Transfer, WholeTransfer, build_optimizer
from boost.elastic.saver import ElasticSaver
from boost.elastic.step import RecoverableStepper
from boost.optim.adamw import Optimizer
from boost.parallel.gradients import StepFlags, StepStats
from boost.train.hooks import Hook, TrainStart
from boost.train.loop import Trainer
from boost.train.step import Stepper

if TYPE_CHECKING:
    from boost.config import Config
    from boost.elastic.recovery import Recovery
    from boost.train.rundir import RunDirectory


class ElasticTrainer(Trainer):
    """A `Trainer` whose replicas change. `recovery` agrees with the other processes on who trains."""

    reducer_type = ElasticReducer
    saver_type = ElasticSaver
    reducer: ElasticReducer
    _saver: ElasticSaver

    def __init__(self, config: "Config", recovery: "Recovery", run: "RunDirectory", hooks: Sequence[Hook] = ()) -> None:
        self.recovery = recovery
        watch = SlowReplicas(config.run.slow_steps, config.run.exclude_slow)
        super().__init__(config, recovery.mesh, run, [TakeOver(), *hooks, watch])
        self.transfer: Transfer = (
            self.optimizer if isinstance(self.optimizer, DividedAdamW) else WholeTransfer(self.optimizer)
        )
        """Sends the optimizer's state to replicas that join."""
        self._for_main = [hook for hook in self.all_hooks if hook not in self.hooks]
        self._is_fitting, self._early = False, list[MembershipChange]()
        self._abandoned_save: int | None = None

    def _build_optimizer(self) -> Optimizer:
        return build_optimizer(self.fused_params, self.config, self.recovery.mesh)

    def _build_stepper(self, ahead: bool | None) -> Stepper:
        parts = self.model, self.fused_params, self.reducer, self.optimizer, self.batches
        return RecoverableStepper(self.recovery, self.config, self.mesh, *parts)

    def prepare_saves(self) -> None:
        """Nothing: replicas rejoin at different times, so the first save allocates its memory."""

    def _train(self, peak: float) -> StepFlags:
        self._is_fitting = True
        for event in self._early:
            self.notify(Hook.on_event, event)
        return super()._train(peak)

    def _take_flags(self) -> StepFlags:
        joins = self.mesh.is_main and self.recovery.has_waiting()
        return super()._take_flags() | (StepFlags.JOIN if joins else StepFlags.NONE)

    def _between_steps(self, stats: StepStats) -> None:
        super()._between_steps(stats)
        if StepFlags.JOIN in stats.flags and not self.at_end:
            self.recovery.admit()
            self._signals_to_reduce = True  # as on the replicas that rejoined

    def abandon_save(self) -> None:
        """Abandons the save in flight, if any, because the replicas change."""
        self._abandoned_save = self._saver.abandon()

    def adopt(self, event: MembershipChange) -> None:
        """Continues with a new set of replicas. `mesh` is already updated; this may now be the main process."""
        self.reducer.rejoin(self.mesh)
        self._stepper.prefetcher.close()
        self.takes_over = True
        promoted: list[Hook] = []
        if self.mesh.is_main:
            promoted, self._for_main = self._for_main, []
        if not self._is_fitting:  # a replica that has just rejoined: `fit` sets up all hooks
            self.hooks[:0] = promoted
            self._early.append(event)
            return
        self._runner.add(self, promoted, TrainStart(self.position.step, self.config.train.steps))
        self.notify(Hook.on_event, event)
        if self._abandoned_save:
            self.request_save()  # the remaining replicas repeat it

    def wait_for_newcomer(self, longest_s: float) -> None:
        """Returns once a lost replica asks to rejoin, at once if none is missing, and after `longest_s` seconds at the latest."""
        until = time.monotonic() + longest_s
        while self.recovery.is_short and not self.recovery.has_waiting() and time.monotonic() < until:
            time.sleep(0.02)
