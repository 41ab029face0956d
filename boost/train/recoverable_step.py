"""A step whose global batch stays whole when replicas are lost: their micro-batches are dealt to those that are left."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch

from boost.parallel.gradients import LaunchedStats, StepFlags, clip_gradients, launch_step_stats
from boost.parallel.membership import share
from boost.train.checkpoint import Position
from boost.train.heartbeat import set_pace
from boost.train.model import run_passes
from boost.train.recovery import Recovery
from boost.train.step import Passes, Stepper, Update, now


class RecoverableStepper(Stepper):
    """A `Stepper` whose sums and statistics are one operation of a `Recovery`. Gradients of this process stay, beside their sums,
    until the operation is complete: one more copy of them in memory."""

    def __init__(self, recovery: Recovery, *parts: Any) -> None:
        """`parts`: as of `Stepper`, but `ahead` is not a choice."""
        *others, _ = parts
        super().__init__(*others)
        self.ahead = False
        self.timed_on = torch.device("cpu")
        self._recovery = recovery
        self.from_tensors = False

    @property
    def micro_batches(self) -> int:
        """Of a global batch."""
        return self.config.train.global_batch // self.config.train.micro_batch

    def passes(self, position: Position, lr: float) -> Passes:
        """The passes of this process's share; sums of gradients begin, but are not waited for."""
        versions = self._versions()
        following = position.step + 1 < self.config.train.steps
        step = position.step + position.skipped
        own, dp = self._recovery.own_share(self.micro_batches), self.mesh.dp
        data = self.prefetcher.take(step, step + 1 if following else None)
        if own != list(share(self.micro_batches, dp.rank, dp.size)):
            data = self.prefetcher.read(step, own)
        self.reducer.begin(data.micro_batches)
        begun = perf_counter()
        with self.copies.in_use():
            loss = run_passes(self.model, data.batches, self.config, divisor=self.tokens)
        if data.micro_batches:
            set_pace((perf_counter() - begun) / data.micro_batches)
        self._recovery.held = own
        return Passes(position, versions, lr, loss, data.targets)

    def update(self, passes: Passes, flags: StepFlags) -> Update:
        """Sums gradients and statistics over the replicas that are left, and makes the update."""
        whole = passes

        def attempt() -> Sequence[float]:
            nonlocal whole
            if more := self._recovery.still_to_do(self.micro_batches):
                self.reducer.again()
                whole = self._more(whole, more)
                self._recovery.held += more
            elif self._recovery.repeats:
                self.reducer.again()
            self.reducer.finish()
            stats = launch_step_stats(self.fused_params, whole.loss, whole.targets, self.tokens, self.mesh, flags)
            return stats.numbers()

        stats = LaunchedStats.of(self.mesh.together(attempt), self.tokens)
        found = stats.read()
        if found.is_finite:
            clip_gradients((s.tensor for s in self.fused_params), found, self.config.optim.clip)
            self.optimizer.step(passes.position.step, passes.lr)
        return Update(passes.lr, stats, now(self.timed_on))

    def _more(self, passes: Passes, numbers: Sequence[int]) -> Passes:
        """The passes of further micro-batches, added to those of this process."""
        data = self.prefetcher.read(passes.position.step + passes.position.skipped, numbers)
        with self.copies.in_use():
            loss = run_passes(self.model, data.batches, self.config, divisor=self.tokens)
        return replace(passes, loss=passes.loss + loss, targets=passes.targets + data.targets)


def stepper_of(recovery: Recovery | None) -> Callable[..., Stepper]:
    """What makes the steps of a run with this recovery."""
    if recovery is None:
        return Stepper
    return lambda *parts: RecoverableStepper(recovery, *parts)
