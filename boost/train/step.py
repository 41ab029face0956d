"""One optimizer step on this process: `Stepper.step`.

On a GPU, passes and update only launch work. To keep the GPU busy, the trainer launches the passes of step n + 1 before it
reads the statistics of step n (order of events: `boost.train.hooks`). The passes need the weights from step n, whose
update was launched before them. They do not need its statistics, which only affect decisions between steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from boost.config import Config
from boost.data.batches import Batches
from boost.models.fused import FusedParam, fused_params
from boost.models.interface import Teaching
from boost.optim.adamw import Optimizer, build_optimizer
from boost.parallel.gradients import (
    GradBucket,
    GradientReducer,
    LaunchedStats,
    StepFlags,
    StepStats,
    clip_gradients,
    launch_step_stats,
)
from boost.parallel.mesh import Mesh
from boost.parallel.pipeline import Pipeline
from boost.parallel.weights import WorkingCopies, forget_gathered, last_backward
from boost.train.checkpoint import Position
from boost.train.graphs import captured_if_configured
from boost.train.hardware import Moment, now
from boost.train.model import Model
from boost.train.prefetch import HostBatch, Prefetcher, StepData, to_device
from boost.train.teacher import Teacher

Teach = Callable[[Tensor, Tensor | None], Teaching]
"""Returns the teacher's output for a micro-batch's (tokens, document ids)."""


class Stepper:
    """Runs the steps of one model on one process, with its optimizer and its data. All processes in the mesh call the same methods
    in the same order."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        model: Model,
        batches: Batches,
        *,
        ahead: bool | None = None,
        from_tensors: bool | None = None,
        bucket: type[GradBucket] | None = None,
        build: Callable[[Sequence[FusedParam], Config, Mesh], Optimizer] = build_optimizer,
    ) -> None:
        """`ahead`, `from_tensors`: the attributes of these names; None: on GPUs only. True needs an optimizer with `takes_tensors`.
        `bucket`: as for `GradientReducer`. `build`: builds the optimizer."""
        self.config, self.mesh, self.model = config, mesh, model
        self.tokens = config.train.global_batch * config.train.seq_len
        """Tokens per global batch."""
        self.fused_params = list(fused_params(model))
        self.reducer = GradientReducer(self.fused_params, mesh, getattr(torch, config.train.sum_dtype), bucket)
        self.optimizer = build(self.fused_params, config, mesh)
        self.copies = WorkingCopies(model, config, self.reducer.accumulated)
        self.run_passes = captured_if_configured(self._run_passes, config, self.fused_params, mesh.device)
        self.prefetcher = Prefetcher(batches, config, mesh)
        self.teacher = Teacher(config, mesh) if config.distill.teacher else None
        # On a CPU, reading the statistics first costs nothing and saves a pass over gradients that need no clipping.
        can, on_gpu = self.optimizer.takes_tensors, mesh.device.type == "cuda"
        self.ahead = can and (on_gpu if ahead is None else ahead)
        """Whether the passes of a step are launched before the statistics of the previous step are read."""
        self.from_tensors = can and (self.ahead or on_gpu if from_tensors is None else from_tensors)
        """Whether updates are launched before their statistics are read."""
        self.timed_on = mesh.device if self.ahead else torch.device("cpu")
        """The device whose clock times the steps. With `ahead`, the host launches one step while the device runs another."""

    def step(self, position: Position, lr: float) -> StepStats:
        """Runs the step after `position`. The trainer makes the same calls, with its hooks in between."""
        data = self.batch(position)
        passes = self.passes(position, lr, data)
        update = self.update(passes, StepFlags.NONE)
        return self.read(update)

    def batch(self, position: Position) -> StepData:
        """This process's data for the step after `position`. Raises DataError if the token store cannot be read."""
        step, left = position.step + position.skipped, self.config.train.steps - position.step
        return self.prefetcher.take(step, range(step + 1, step + min(left, 3 if self.ahead else 2)))

    def passes(self, position: Position, lr: float, data: StepData) -> "Passes":
        """Launches forward and backward passes over the micro-batches and the reduction of their gradients. Leaves no collective
        pending, so the result may be discarded."""
        loss = self.run_passes(data.batches, data.micro_batches)
        text = None if self.teacher is None else self.teacher.cross_entropy / self.tokens
        return Passes(position, self._versions(), lr, loss, data.targets, text)

    def _run_passes(self, batches: Sequence[HostBatch], micro_batches: int) -> Tensor:
        """The part of `passes` that is the same in every step and runs on the device: one CUDA graph if configured."""
        self.reducer.begin(micro_batches)
        with self.copies.in_use():
            if self.teacher is not None:
                self.teacher.cross_entropy.zero_()
            loss = run_passes(self.model, batches, self.config, self.tokens, self.teacher)
        self.reducer.finish()
        return loss

    def is_current(self, passes: "Passes", position: Position) -> bool:
        """Whether `passes` are those of the step after `position` and no weight has changed since they were launched."""
        return passes.position == position and passes.versions == self._versions()

    def update(self, passes: "Passes", flags: StepFlags) -> "Update":
        """Launches the update with the gradients of `passes`. It changes weights only if the statistics allow it (`updates`).
        Reduces `flags` together with the statistics."""
        optimizer, clip = self.optimizer, self.config.optim.clip
        stats = self.reduce(passes, flags)
        if self.from_tensors:
            optimizer.launch(passes.lr, *stats.for_update(clip))
        else:
            numbers = stats.read()
            if numbers.updates:
                clip_gradients((s.tensor for s in self.fused_params), numbers, clip)
                optimizer.step(passes.position.step, passes.lr)
        forget_gathered(self.model)  # weights that hooks gathered after the passes
        return Update(passes.lr, stats, now(self.timed_on))

    def reduce(self, passes: "Passes", flags: StepFlags) -> LaunchedStats:
        """Launches the reduction of the step's statistics and of `flags` over the mesh."""
        local = passes.loss, passes.targets, self.tokens
        return launch_step_stats(self.fused_params, *local, self.mesh, flags, passes.cross_entropy)

    def read(self, update: "Update") -> StepStats:
        """Waits for a step's statistics and returns them. Does not wait for work launched later."""
        stats = update.stats.read()
        if self.from_tensors and not stats.updates:
            self.optimizer.take_back()
        return stats

    def _versions(self) -> tuple[int, ...]:
        return tuple(fused.tensor._version for fused in self.fused_params)


def run_passes(
    model: Model, batches: Sequence[HostBatch], config: Config, divisor: int, teach: Teach | None = None
) -> Tensor:
    """Runs forward and backward passes over this process's micro-batches in a step and accumulates gradients. A pipeline takes a
    single batch, with all micro-batches concatenated along dim 0, and no teacher.

    Returns the fp64 sum of the losses, divided (as are the gradients) by `divisor`; 0 on a process without the head.
    """
    isolate = config.data.isolate_documents
    if isinstance(model, Pipeline) and batches:
        return model.backward(*to_device(batches[0], isolate, model.device), divisor)
    total = torch.zeros((), dtype=torch.double, device=model.device)
    for number, batch in enumerate(batches, start=1):
        last_backward(model, number == len(batches), config.parallel)
        tokens, targets, documents = to_device(batch, isolate, model.device)
        taught = {} if teach is None else {"teaching": teach(tokens, documents)}
        loss = model(tokens, targets, documents, **taught) / divisor
        loss.backward()
        total += loss.detach()
    return total


@dataclass(frozen=True)
class Passes:
    """A step's launched forward and backward passes. `Stepper.update` finds the gradients in the reducer's buckets."""

    position: Position
    """The position of the weights that the passes use."""
    versions: tuple[int, ...]
    """torch's version counters of these weights; every in-place change increments them."""
    lr: float
    loss: Tensor
    """This process's loss, an fp64 scalar, as returned by `run_passes`."""
    targets: int
    """Number of targets on this process."""
    cross_entropy: Tensor | None = None
    """With a teacher: the cross-entropy in `loss` before weighting, which is comparable between runs."""


@dataclass(frozen=True)
class Update:
    """A step's update, already launched (on CPUs, already complete). Its statistics may not have been read yet."""

    lr: float
    stats: LaunchedStats
    end: Moment
    """End of the update, for `StepClock`."""
