"""The step of a run with in-step recovery: its global batch stays the same while replicas are lost and rejoin (docs/recovery.md).

Gradient sums can be discarded and recomputed: the survivors compute the lost micro-batches. For that, local gradients are kept next
to their sums until the next step begins, which takes memory for a second copy.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from boost.config import Config
from boost.data.batches import Batches
from boost.elastic.optimizer import build_optimizer
from boost.elastic.recovery import Recovery
from boost.parallel.gradients import GradBucket, GradientReducer, LaunchedStats, StepFlags, launch_step_stats
from boost.parallel.mesh import Axis, Mesh, share
from boost.train.checkpoint import Position
from boost.train.hardware import Moment, now, seconds_between
from boost.train.heartbeat import set_pace
from boost.train.model import Model
from boost.train.prefetch import HostBatch, StepData
from boost.train.step import Passes, Stepper, run_passes


class KeptBucket(GradBucket):
    """A bucket that keeps this process's own gradients next to their sums until the next step begins."""

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

    def reset(self, micro_batches: int) -> None:
        super().reset(micro_batches)
        self.own = []

    def take_back(self) -> None:
        """Restores the gradients from before `launch`. An all-reduce still in flight uses its own memory."""
        for parameter, gradient in zip(self.parameters, self.own, strict=bool(self.own)):
            parameter.grad = gradient
        self.flat, self.own = None, []


def restore_local(reducer: GradientReducer) -> None:
    """Discards sums, in flight or complete, and restores this process's own gradients for further accumulation. Until the next
    step, only `GradientReducer.finish` sums them."""
    for queue in reducer.queues:
        queue.active, queue.next_bucket = False, 0
        for bucket in queue.buckets:
            assert isinstance(bucket, KeptBucket)
            bucket.take_back()


class RecoverableStepper(Stepper):
    """A `Stepper` whose reduction of gradients and statistics is one operation of a `Recovery`, after the passes."""

    def __init__(self, recovery: Recovery, config: Config, mesh: Mesh, model: Model, batches: Batches) -> None:
        """Like `Stepper`, with updates from numbers on the host, because survivors may take them from each other."""
        super().__init__(
            config,
            mesh,
            model,
            batches,
            ahead=False,
            from_tensors=False,
            bucket=KeptBucket,
            build=lambda fused_params, config, _: build_optimizer(fused_params, config, recovery.mesh),
        )
        self._recovery = recovery
        self._timed: tuple[Moment, Moment, int] = (0.0, 0.0, 0)
        """Start and end of the step's passes, and the number of micro-batches between them."""

    def batch(self, position: Position) -> StepData:
        """This process's share of the step's data."""
        data, dp = super().batch(position), self.mesh.dp
        own = self._recovery.held = self._recovery.assigned()
        is_usual = own == list(share(self._recovery.micro_batches, dp.rank, dp.size))
        return data if is_usual else self.prefetcher.read(position.step + position.skipped, own)

    def _run_passes(self, batches: Sequence[HostBatch], micro_batches: int) -> Tensor:
        """Starts the reduction of gradients without waiting for it."""
        self.reducer.begin(micro_batches)
        begun = now(self.mesh.device)
        loss = self._more_passes(batches)
        self._timed = begun, now(self.mesh.device), micro_batches
        return loss

    def _more_passes(self, batches: Sequence[HostBatch]) -> Tensor:
        with self.copies.in_use():
            return run_passes(self.model, batches, self.config, divisor=self.tokens)

    def reduce(self, passes: Passes, flags: StepFlags) -> LaunchedStats:
        """Reduces gradients and statistics over the surviving replicas, which also compute what lost ones have not."""
        loss, targets = passes.loss, passes.targets

        def attempt() -> list[float]:
            nonlocal loss, targets
            if self._recovery.repeats:
                restore_local(self.reducer)
            if self._recovery.repeats and (more := self._recovery.assigned()):
                data = self.prefetcher.read(passes.position.step + passes.position.skipped, more)
                loss, targets = loss + self._more_passes(data.batches), targets + data.targets
                self._recovery.held += more
            self.reducer.finish()
            return launch_step_stats(self.fused_params, loss, targets, self.tokens, self.mesh, flags).numbers()

        stats = LaunchedStats.of(self.mesh.together(attempt), self.tokens)
        begun, end, micro_batches = self._timed
        if micro_batches:
            set_pace(seconds_between(begun, end) / micro_batches)  # the GPU has finished by now
        return stats
