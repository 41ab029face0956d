"""The trainer for a run with in-step recovery: it keeps training while replicas are lost and rejoin (docs/recovery.md).

Gradient sums can be discarded and recomputed. A step therefore keeps its global batch: the survivors compute the lost
micro-batches. If replicas change during a save, the save is abandoned, and the remaining replicas repeat it.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from boost.config import Config
from boost.elastic.groups import PeersLostError
from boost.elastic.hooks import MembershipChange, SlowReplicas, TakeOver
from boost.elastic.mesh import ElasticMesh
from boost.elastic.optimizer import DividedAdamW, Division, Transfer, WholeTransfer, build_optimizer
from boost.elastic.recovery import Recovery
from boost.optim.adamw import Optimizer
from boost.parallel.gradients import (
    BucketQueue,
    GradBucket,
    GradientReducer,
    LaunchedStats,
    StepFlags,
    StepStats,
    clip_gradients,
    launch_step_stats,
)
from boost.parallel.mesh import Axis, Mesh, share
from boost.train.checkpoint import Position
from boost.train.checkpoint.reshard import SaveShare
from boost.train.checkpoint.write import CheckpointSaver, HostBuffer
from boost.train.hardware import Moment, now, seconds_between
from boost.train.heartbeat import set_pace
from boost.train.hooks import Hook, TrainStart
from boost.train.loop import Trainer
from boost.train.replicas import ReplicaReport, check_replicas
from boost.train.rundir import RunDirectory
from boost.train.step import Passes, Stepper, Update, run_passes

ABANDON_S = 5.0
"""How long to wait for an abandoned save to end, in seconds; it may be writing a file."""


class ElasticReducer(GradientReducer):
    """A `GradientReducer` that keeps this process's own gradients next to their sums until the next step begins."""

    def queue(self, parameters: Sequence[nn.Parameter], axis: Axis, dtype: torch.dtype | None) -> BucketQueue:
        """The buckets of `parameters`. Even an axis with one process has buckets, because replicas may join."""
        return BucketQueue(parameters, axis, dtype, _KeptBucket)

    def rejoin(self, mesh: Mesh) -> None:
        """Makes later steps sum over the axes of `mesh`."""
        for queue, axis in zip(self._queues, (mesh.replicas, mesh.dp_cp, mesh.tp), strict=True):
            queue.axis = axis

    def begin(self, micro_batches: int = 1) -> None:
        """Starts a step, as in the base class, and frees this process's own gradients from the previous step."""
        super().begin(micro_batches)
        for queue in self._queues:
            for bucket in queue.buckets:
                cast(_KeptBucket, bucket).own = []

    def restore_local(self) -> None:
        """Discards sums, in flight or complete, and restores this process's own gradients for further accumulation. Until the next
        step, only `finish` sums them."""
        for queue in self._queues:
            queue.active, queue.next_bucket = False, 0
            for bucket in queue.buckets:
                cast(_KeptBucket, bucket).take_back()


class _KeptBucket(GradBucket):
    """A bucket that keeps the gradients that it sums."""

    def __init__(self, parameters: Sequence[nn.Parameter], dtype: torch.dtype | None) -> None:
        super().__init__(parameters, dtype)
        self.own: list[Tensor] = []
        """This process's own gradients; empty until the sum starts."""

    def launch(self, axis: Axis) -> None:
        own = self.gradients()
        # torch sums a single gradient in place, not in a flat copy.
        self.own = own if axis.size == 1 or self.is_cast or len(own) > 1 else [own[0].clone()]
        super().launch(axis)

    def wait(self) -> None:
        # The base class would copy the sums over this process's own gradients.
        if self.flat is not None and self.is_cast:
            for parameter, gradient in zip(self.parameters, self.own, strict=True):
                parameter.grad = torch.empty_like(gradient)
        super().wait()

    def take_back(self) -> None:
        """Restores the gradients from before `launch`. An all-reduce still in flight uses its own memory."""
        for parameter, gradient in zip(self.parameters, self.own, strict=bool(self.own)):
            parameter.grad = gradient
        self.flat, self.own = None, []


class RecoverableStepper(Stepper):
    """A `Stepper` whose gradient reduction and statistics form one operation of a `Recovery`.

    Local gradients are kept next to their sums until the next step begins, which takes memory for a second copy."""

    reducer: ElasticReducer

    def __init__(self, recovery: Recovery, *parts: Any) -> None:
        """`parts`: arguments of `Stepper` except `ahead`."""
        super().__init__(*parts)
        self.ahead = self.from_tensors = False
        self.timed_on = torch.device("cpu")
        self._recovery = recovery
        self._timed: tuple[Moment, Moment, int] = (0.0, 0.0, 0)
        """Start and end of the step's passes, and the number of micro-batches between them."""

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches per global batch."""
        return self.config.train.global_batch // self.config.train.micro_batch

    def passes(self, position: Position, lr: float) -> Passes:
        """Runs the passes for this process's share and starts the reduction of gradients without waiting for it."""
        versions = self._versions()
        following = position.step + 1 < self.config.train.steps
        step = position.step + position.skipped
        own, dp = self._recovery.own_share(self.micro_batches), self.mesh.dp
        data = self.prefetcher.take(step, step + 1 if following else None)
        if own != list(share(self.micro_batches, dp.rank, dp.size)):
            data = self.prefetcher.read(step, own)
        self.reducer.begin(data.micro_batches)
        begun = now(self.mesh.device)
        with self.copies.in_use():
            loss = run_passes(self.model, data.batches, self.config, divisor=self.tokens)
        self._timed = begun, now(self.mesh.device), data.micro_batches
        self._recovery.held = own
        return Passes(position, versions, lr, loss, data.targets)

    def update(self, passes: Passes, flags: StepFlags) -> Update:
        """Reduces gradients and statistics over the surviving replicas, then updates the weights."""
        whole = passes

        def attempt() -> Sequence[float]:
            nonlocal whole
            if more := self._recovery.remaining(self.micro_batches):
                self.reducer.restore_local()
                data = self.prefetcher.read(passes.position.step + passes.position.skipped, more)
                with self.copies.in_use():
                    loss = run_passes(self.model, data.batches, self.config, divisor=self.tokens)
                whole = replace(whole, loss=whole.loss + loss, targets=whole.targets + data.targets)
                self._recovery.held += more
            elif self._recovery.repeats:
                self.reducer.restore_local()
            self.reducer.finish()
            stats = launch_step_stats(self.fused_params, whole.loss, whole.targets, self.tokens, self.mesh, flags)
            return stats.numbers()

        stats = LaunchedStats.of(self.mesh.together(attempt), self.tokens)
        numbers = stats.read()
        begun, end, micro_batches = self._timed
        if micro_batches:
            set_pace(seconds_between(begun, end) / micro_batches)  # the GPU has finished by now
        if numbers.updates:
            clip_gradients((s.tensor for s in self.fused_params), numbers, self.config.optim.clip)
            self.optimizer.step(passes.position.step, passes.lr)
        return Update(passes.lr, stats, now(self.timed_on))


class ElasticSaver(CheckpointSaver):
    """A `CheckpointSaver` that works with the current replicas."""

    expected_errors = (PeersLostError,)
    prepares = False  # replicas rejoin at different times
    _division: Division | None = None
    """The division of the moments to which this process's share belongs."""

    def abandon(self) -> int | None:
        """Abandons the save in flight because the replicas changed. Returns its step; None if no save was in flight."""
        step, thread = self.in_flight, self._thread
        self._thread = self._share = self._group = None
        if thread is not None:
            thread.join(ABANDON_S)
            self._buffer = HostBuffer()  # the thread may still read the old one
        return step

    def _open_group(self) -> dist.ProcessGroup | None:
        return cast(ElasticMesh, self._mesh).background.group

    def _close_group(self, group: dist.ProcessGroup) -> None:
        """Does nothing, because the group belongs to the membership."""

    def _current_share(self) -> SaveShare:
        optimizer = self._optimizer
        if isinstance(optimizer, DividedAdamW) and (self._share is None or self._division != optimizer.division):
            optimizer.require_whole()
            self._share, self._division = None, optimizer.division
        return super()._current_share()


class ElasticTrainer(Trainer):
    """A `Trainer` whose replicas change. `recovery` agrees with the other processes on which replicas train."""

    reducer_type = ElasticReducer
    saver_type = ElasticSaver
    reducer: ElasticReducer

    def __init__(self, config: Config, recovery: Recovery, run: RunDirectory, hooks: Sequence[Hook] = ()) -> None:
        self.recovery = recovery
        exclude = recovery.exclude_slow if config.run.exclude_slow else None
        watch = SlowReplicas(config.run.slow_steps, lambda: (recovery.decision, recovery.beats()), exclude)
        super().__init__(config, recovery.mesh, run, [TakeOver(), *hooks, watch])
        self.transfer: Transfer = (
            self.optimizer if isinstance(self.optimizer, DividedAdamW) else WholeTransfer(self.optimizer)
        )
        """Sends the optimizer's state to joining replicas."""
        self._for_main = [hook for hook in self.all_hooks if hook not in self.hooks]
        self._is_fitting, self._early = False, list[MembershipChange]()
        self._abandoned_save: int | None = None

    def _build_optimizer(self) -> Optimizer:
        return build_optimizer(self.fused_params, self.config, self.recovery.mesh)

    def _build_stepper(self, ahead: bool | None) -> Stepper:
        parts = self.model, self.fused_params, self.reducer, self.optimizer, self.batches
        return RecoverableStepper(self.recovery, self.config, self.mesh, *parts)

    def _compare_replicas(self) -> ReplicaReport:
        conflict = self.optimizer.conflict if isinstance(self.optimizer, DividedAdamW) else None
        return check_replicas(self.fused_params, self.mesh, self.optimizer.moments, conflict)

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
            self._signals_to_reduce = True  # must match rejoined replicas, which start with True

    def abandon_save(self) -> None:
        """Abandons the save in flight, if any, because the replicas change."""
        self._abandoned_save = cast(ElasticSaver, self.saves.saver).abandon()

    def adopt(self, event: MembershipChange) -> None:
        """Continues with a new set of replicas. `mesh` is already up to date; this process may now be the main one."""
        self.reducer.rejoin(self.mesh)
        self._stepper.prefetcher.close()
        self.takes_over = True
        promoted: list[Hook] = []
        if self.mesh.is_main:
            promoted, self._for_main = self._for_main, []
        if not self._is_fitting:  # this replica has just rejoined: `fit` sets up all hooks
            self.hooks[:0] = promoted
            self._early.append(event)
            return
        self._runner.add(self, promoted, TrainStart(self.position.step, self.config.train.steps))
        self.notify(Hook.on_event, event)
        if self._abandoned_save:
            self.request_save()  # the remaining replicas repeat it

    def wait_for_newcomer(self, longest_s: float) -> None:
        """Returns once a lost replica asks to rejoin, immediately if none is missing, and after at most `longest_s` seconds."""
        until = time.monotonic() + longest_s
        while self.recovery.is_short and not self.recovery.has_waiting() and time.monotonic() < until:
            time.sleep(0.02)
