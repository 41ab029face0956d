"""One optimizer step on this process. `Stepper.passes` reads the batch, runs forward and backward passes over its micro-batches,
and reduces gradients. `Stepper.update` launches the reduction of the statistics, clips the gradients and updates the weights.
`Stepper.read` waits for the statistics.

On a GPU, the first two only launch work. To keep the GPU busy, the trainer launches the passes of step n + 1 before it
reads the statistics of step n (order of events: `boost.train.hooks`). The passes need the weights from step n, whose
update was launched before them. They do not need its statistics, which only affect decisions between steps.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from boost.config import Config
from boost.config.architecture import IGNORED
from boost.data.batches import Batches, join
from boost.models.fused import FusedParam
from boost.models.interface import Teaching
from boost.optim.adamw import Optimizer
from boost.parallel.gradients import (
    GradientReducer,
    LaunchedStats,
    StepFlags,
    StepStats,
    clip_gradients,
    launch_step_stats,
)
from boost.parallel.mesh import Mesh, share
from boost.parallel.pipeline import Pipeline
from boost.parallel.weights import WorkingCopies, forget_gathered, last_backward
from boost.train.checkpoint import Position
from boost.train.graphs import captured_if_configured
from boost.train.hardware import Moment, now
from boost.train.model import HostBatch, Model, host_batch, to_device
from boost.train.teacher import Teacher

Teach = Callable[[Tensor, Tensor | None], Teaching]
"""Returns the teacher's output for a micro-batch's (tokens, document ids)."""


class Stepper:
    """Runs the steps on one process: `passes`, `update`, `read`. All processes in the mesh call the same methods in the
    same order."""

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
        """`ahead`: see `Trainer`."""
        self.config, self.mesh, self.model = config, mesh, model
        self.fused_params, self.reducer, self.optimizer = fused_params, reducer, optimizer
        self.copies = WorkingCopies(model, config, reducer.accumulated)
        self.run_passes = captured_if_configured(self._run_passes, config, fused_params, mesh.device)
        self.prefetcher = Prefetcher(batches, config, mesh)
        self.teacher = Teacher(config, mesh) if config.distill.teacher else None
        self.ahead = optimizer.takes_tensors and (mesh.device.type == "cuda" if ahead is None else ahead)
        """Whether the passes of a step are launched before the statistics of the previous step are read."""
        # On a CPU, reading the statistics first costs nothing and saves a pass over gradients that need no clipping.
        self.from_tensors = self.ahead or (optimizer.takes_tensors and mesh.device.type == "cuda")
        """Whether updates are launched before their statistics are read."""
        self.timed_on = mesh.device if self.ahead else torch.device("cpu")
        """The device whose clock times the steps. With `ahead`, the host launches one step while the device runs another."""

    @property
    def tokens(self) -> int:
        """Tokens per global batch."""
        return self.config.train.global_batch * self.config.train.seq_len

    def passes(self, position: Position, lr: float) -> "Passes":
        """Launches the passes for the step after `position` and the reduction of their gradients. Leaves no collective
        pending, so the result may be discarded.

        Raises DataError if the token store cannot be read.
        """
        data_step = position.step + position.skipped
        data = self.prefetcher.take(data_step, data_step + 1 if position.step + 1 < self.config.train.steps else None)
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
        local = passes.loss, passes.targets, self.tokens
        stats = launch_step_stats(self.fused_params, *local, self.mesh, flags, passes.cross_entropy)
        if self.from_tensors:
            optimizer.launch(passes.lr, *stats.for_update(clip))
        else:
            numbers = stats.read()
            if numbers.updates:
                clip_gradients((s.tensor for s in self.fused_params), numbers, clip)
                optimizer.step(passes.position.step, passes.lr)
        forget_gathered(self.model)  # weights that hooks gathered after the passes
        return Update(passes.lr, stats, now(self.timed_on))

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


# The data for a step, read one step ahead.


@dataclass(frozen=True)
class StepData:
    """One process's data for one step."""

    batches: list[HostBatch]
    """Micro-batches, in order; with pipeline parallelism, one batch that concatenates them."""
    micro_batches: int
    targets: int
    """Number of targets."""


class Prefetcher:
    """Reads this process's data for any step, and prefetches the data for the next step.

    The data for a step depends only on the step's number, so data prefetched for another step is discarded. Each object
    reads in its own thread; on GPUs, it reads into pinned memory, so that copies to the device are asynchronous.
    """

    def __init__(self, batches: Batches, config: Config, mesh: Mesh) -> None:
        self._batches, self._config, self._mesh = batches, config, mesh
        self._executor: ThreadPoolExecutor | None = None
        self._ahead: tuple[int, Future[StepData]] | None = None

    def take(self, step: int, following: int | None = None) -> StepData:
        """Returns the data for a step from `Batches`, and starts to prefetch the data for step `following`.

        Raises DataError if the store could not be read, even if the error occurred during prefetching."""
        (read, future), self._ahead = self._ahead or (None, None), None
        if future is None or read != step:
            if future is not None:
                future.cancel()
            future = self._submit(step)
        data = future.result()
        if following is not None:
            self._ahead = following, self._submit(following)
        return data

    def close(self) -> None:
        """Ends the thread without waiting for a read in progress. `take` starts a new one."""
        executor, self._executor, self._ahead = self._executor, None, None
        if executor is not None:
            executor.shutdown(wait=False, cancel_futures=True)

    def _submit(self, step: int) -> "Future[StepData]":
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "boost-data", initializer=self._enter_thread)
        dp, train = self._mesh.dp, self._config.train
        own = share(train.global_batch // train.micro_batch, dp.rank, dp.size)
        return self._executor.submit(self.read, step, own)

    def _enter_thread(self) -> None:
        # A new thread starts on GPU 0, where pinning memory would create a CUDA context for every process on the machine.
        if self._mesh.device.type == "cuda":
            torch.cuda.set_device(self._mesh.device)

    def read(self, step: int, numbers: Sequence[int]) -> StepData:
        """Reads the given micro-batches for a step synchronously. Raises DataError."""
        config, cp = self._config, self._mesh.cp
        whole = self._batches.numbered(step, numbers, config.train.micro_batch)
        batches = [batch.share(cp.rank, cp.size) for batch in whole]
        targets = sum(int((batch.targets != IGNORED).sum()) for batch in batches)
        joined = [join(batches)] if config.parallel.pp > 1 and batches else batches
        pin = self._mesh.device.type == "cuda"
        return StepData([host_batch(batch, pin) for batch in joined], len(batches), targets)
