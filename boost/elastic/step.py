"""A training step that keeps its global batch when replicas are lost: the survivors compute the lost micro-batches."""

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from boost.elastic.gradients import ElasticReducer
from boost.parallel.gradients import LaunchedStats, StepFlags, clip_gradients, launch_step_stats
from boost.parallel.mesh import share
from boost.train.checkpoint import Position
from boost.train.heartbeat import set_pace
from boost.train.model import run_passes
from boost.train.step import Passes, Stepper, Update, now

if TYPE_CHECKING:
    from boost.elastic.recovery import Recovery


class RecoverableStepper(Stepper):
    """A `Stepper` whose gradient reduction and statistics form one operation of a `Recovery`.

    Local gradients are kept next to their sums until the operation is complete, which takes one more copy of them in memory."""

    reducer: ElasticReducer

    def __init__(self, recovery: "Recovery", *parts: Any) -> None:
        """`parts`: arguments of `Stepper` except `ahead`."""
        super().__init__(*parts)
        self.ahead = self.from_tensors = False
        self.timed_on = torch.device("cpu")
        self._recovery = recovery

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches per global batch."""
        return self.config.train.global_batch // self.config.train.micro_batch

    def passes(self, position: Position, lr: float) -> Passes:
        """Runs the passes of this process's share and starts the reduction of gradients without waiting for it."""
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
        """Reduces gradients and statistics over the surviving replicas, then updates the weights."""
        whole = passes

        def attempt() -> Sequence[float]:
            nonlocal whole
            if more := self._recovery.remaining(self.micro_batches):
                self.reducer.restore_local()
                whole = self._more(whole, more)
                self._recovery.held += more
            elif self._recovery.repeats:
                self.reducer.restore_local()
            self.reducer.finish()
            stats = launch_step_stats(self.fused_params, whole.loss, whole.targets, self.tokens, self.mesh, flags)
            return stats.numbers()

        stats = LaunchedStats.of(self.mesh.together(attempt), self.tokens)
        found = stats.read()
        if found.updates:
            clip_gradients((s.tensor for s in self.fused_params), found, self.config.optim.clip)
            self.optimizer.step(passes.position.step, passes.lr)
        return Update(passes.lr, stats, now(self.timed_on))

    def _more(self, passes: Passes, numbers: Sequence[int]) -> Passes:
        """Runs the passes of further micro-batches and adds them to `passes`."""
        data = self.prefetcher.read(passes.position.step + passes.position.skipped, numbers)
        with self.copies.in_use():
            loss = run_passes(self.model, data.batches, self.config, divisor=self.tokens)
        return replace(passes, loss=passes.loss + loss, targets=passes.targets + data.targets)
