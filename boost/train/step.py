"""One optimizer step of this process in three parts: its passes, its update, its numbers.

On a GPU the first two only launch work. So that it never runs out of work, the trainer launches the passes of step n + 1 before it
reads the numbers of step n (order of events: `boost.train.hooks`). The passes need the weights of step n, whose update was launched
before them, but not its numbers: those decide only what happens around a step.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from boost.config import Config
from boost.data.batches import Batches
from boost.models.fused import FusedParam
from boost.optim.adamw import Optimizer
from boost.parallel.gradients import (
    GradientReducer,
    LaunchedStats,
    StepFlags,
    StepStats,
    clip_gradients,
    launch_step_stats,
)
from boost.parallel.mesh import Mesh
from boost.parallel.sharding import forget_gathered
from boost.parallel.working import WorkingCopies
from boost.train.checkpoint import Position
from boost.train.model import Model, run_passes
from boost.train.prefetch import Prefetcher


@dataclass(frozen=True)
class Passes:
    """Forward and backward passes of a step, launched. The gradients are where `Stepper.update` finds them."""

    position: Position
    """Of the weights they were computed with."""
    versions: tuple[int, ...]
    """Of the weights, which torch counts up with every change in place."""
    lr: float
    loss: Tensor
    """fp64 scalar; of this process, as of `run_passes`."""
    targets: int
    """Positions of this process that have a target."""


@dataclass(frozen=True)
class Update:
    """A step whose update was launched, or on a CPU made. Its numbers may not have been read."""

    lr: float
    stats: LaunchedStats
    end: "float | torch.cuda.Event"
    """When it was done, for `StepClock`."""


class Stepper:
    """The steps of one process. The methods are called in turn; every process of the mesh calls the same ones."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        model: Model,
        fused_params: Sequence[FusedParam],
        reducer: GradientReducer,
        optimizer: Optimizer,
        batches: Batches,
        ahead: bool | None = None,
    ) -> None:
        """`ahead`: as of `Trainer`."""
        self.config, self.mesh, self.model = config, mesh, model
        self.fused_params, self.reducer, self.optimizer = fused_params, reducer, optimizer
        self.copies = WorkingCopies(model, config, reducer.accumulated)
        self.prefetcher = Prefetcher(batches, config, mesh)
        self.ahead = optimizer.takes_tensors and (mesh.device.type == "cuda" if ahead is None else ahead)
        """Whether the passes of a step are launched before the numbers of the step before it are read."""
        # On a CPU, where nothing waits, numbers save a pass over gradients that need no clipping.
        self.from_tensors = self.ahead or (optimizer.takes_tensors and mesh.device.type == "cuda")
        """Whether updates are launched without their numbers."""
        self.timed_on = mesh.device if self.ahead else torch.device("cpu")
        """Whose time the seconds of a step are. Ahead, the host launches a step while the device makes another one."""

    @property
    def tokens(self) -> int:
        """Positions of a global batch."""
        return self.config.train.global_batch * self.config.train.seq_len

    def passes(self, position: Position, lr: float) -> Passes:
        """Launches the passes of the step after `position` and the sums of its gradients. No collective is left to wait for: the
        passes may be dropped.

        Raises DataError if the token store cannot be read.
        """
        data_step = position.step + position.skipped
        data = self.prefetcher.take(data_step, data_step + 1 if position.step + 1 < self.config.train.steps else None)
        versions = self._versions()
        self.reducer.begin(data.micro_batches)
        with self.copies.in_use():
            loss = run_passes(self.model, data.batches, self.config, divisor=self.tokens)
        self.reducer.finish()
        return Passes(position, versions, lr, loss, data.targets)

    def is_current(self, passes: Passes, position: Position) -> bool:
        """Whether passes belong to the step after `position`, and no weight has changed since."""
        return passes.position == position and passes.versions == self._versions()

    def update(self, passes: Passes, flags: StepFlags) -> Update:
        """Launches the update that passes lead to; none if the loss or the gradient norm is not finite. Sends `flags` along."""
        optimizer, clip = self.optimizer, self.config.optim.clip
        stats = launch_step_stats(self.fused_params, passes.loss, passes.targets, self.tokens, self.mesh, flags)
        if self.from_tensors:
            optimizer.launch(passes.lr, *stats.for_update(clip))
        else:
            found = stats.read()
            if found.is_finite:
                clip_gradients((s.tensor for s in self.fused_params), found, clip)
                optimizer.step(passes.position.step, passes.lr)
        forget_gathered(self.model)  # by hooks since the passes
        return Update(passes.lr, stats, now(self.timed_on))

    def read(self, update: Update) -> StepStats:
        """The numbers of a step. Waits until they are known, but for nothing that was launched since."""
        stats = update.stats.read()
        if self.from_tensors and not stats.is_finite:
            self.optimizer.take_back()
        return stats

    def _versions(self) -> tuple[int, ...]:
        return tuple(fused.tensor._version for fused in self.fused_params)


def now(device: torch.device) -> "float | torch.cuda.Event":
    """This moment: on a GPU, when it has done all that was launched so far."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(first: "float | torch.cuda.Event", second: "float | torch.cuda.Event") -> float:
    """Seconds from one moment to a later one of the same device; waits for it."""
    if isinstance(first, float) or isinstance(second, float):
        assert isinstance(first, float) and isinstance(second, float), "moments of one device"
        return second - first
    second.synchronize()
    return first.elapsed_time(second) / 1e3


class StepClock:
    """Seconds of each step: from the end of the one before it to its own, without what hooks in between took.

    On a GPU these are times of the GPU: hooks that run while it computes take none of them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin: float | torch.cuda.Event | None = None
        self._paused: float | torch.cuda.Event | None = None
        self._gap: tuple[float | torch.cuda.Event, float | torch.cuda.Event] | None = None

    def pause(self) -> None:
        """Hooks begin."""
        self._paused = now(self._device)

    def resume(self) -> None:
        """The step begins, or goes on after hooks; nothing if it does already."""
        if self._begin is None:
            self._begin = now(self._device)
        elif self._paused is not None:
            self._gap, self._paused = (self._paused, now(self._device)), None

    def seconds(self, update: Update) -> float:
        """Of the step that ends with this update. Waits for it."""
        assert self._begin is not None, "resume comes before the first step"
        gap = seconds_between(*self._gap) if self._gap is not None else 0.0
        found = seconds_between(self._begin, update.end) - gap
        self._begin, self._gap = update.end, None
        return found
