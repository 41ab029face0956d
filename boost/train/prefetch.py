"""Prefetches the batches of the next step in a thread while the current step runs."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from boost.config import Config
from boost.config.architecture import IGNORED
from boost.data.batches import Batches, join
from boost.parallel.mesh import Mesh, share
from boost.train.model import HostBatch, host_batch


@dataclass(frozen=True)
class StepData:
    """The data of one process for one step."""

    batches: list[HostBatch]
    """Micro-batches in order; with pipeline parallelism a single batch, their concatenation."""
    micro_batches: int
    targets: int
    """Number of targets."""


class Prefetcher:
    """Reads this process's data of any step, and prefetches that of the following one.

    The data of a step depends only on its number, so data prefetched for another step is discarded. Each object reads in its own
    thread; on GPUs into pinned memory, so that copies to the device are asynchronous.
    """

    def __init__(self, batches: Batches, config: Config, mesh: Mesh) -> None:
        self._batches, self._config, self._mesh = batches, config, mesh
        self._executor: ThreadPoolExecutor | None = None
        self._ahead: tuple[int, Future[StepData]] | None = None

    def take(self, step: int, following: int | None = None) -> StepData:
        """Returns the data of a step of `Batches`, and starts to prefetch that of step `following`.

        Raises DataError if the store cannot be read, including errors during prefetching."""
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
        # A new thread starts on GPU 0, where pinning memory would create a CUDA context for every process of the machine.
        if self._mesh.device.type == "cuda":
            torch.cuda.set_device(self._mesh.device)

    def read(self, step: int, numbers: Sequence[int]) -> StepData:
        """Reads the given micro-batches of a step synchronously. Raises DataError."""
        config, cp = self._config, self._mesh.cp
        whole = self._batches.numbered(step, numbers, config.train.micro_batch)
        batches = [batch.share(cp.rank, cp.size) for batch in whole]
        targets = sum(int((batch.targets != IGNORED).sum()) for batch in batches)
        joined = [join(batches)] if config.parallel.pp > 1 and batches else batches
        pin = self._mesh.device.type == "cuda"
        return StepData([host_batch(batch, pin) for batch in joined], len(batches), targets)
