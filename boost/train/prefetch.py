"""Batches of the next step, read by a thread while this step runs."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from boost.config import Config
from boost.config.architecture import IGNORED
from boost.data.batches import Batches, join
from boost.parallel.membership import share
from boost.parallel.mesh import Mesh
from boost.train.model import HostBatch, host_batch


@dataclass(frozen=True)
class StepData:
    """What one process trains on in a step."""

    batches: list[HostBatch]
    """Its micro-batches in order; for a pipeline one batch, all of them one below the other."""
    micro_batches: int
    targets: int
    """Positions that have a target."""


class Prefetcher:
    """This process's data of any step, and ahead of time that of the step after it.

    Which data a step gets depends on its number alone: what was read for another step is dropped. A thread reads, for this object
    only; on GPUs into pinned memory, from which a copy to the device does not wait.
    """

    def __init__(self, batches: Batches, config: Config, mesh: Mesh) -> None:
        self._batches, self._config, self._mesh = batches, config, mesh
        self._executor: ThreadPoolExecutor | None = None
        self._ahead: tuple[int, Future[StepData]] | None = None

    def take(self, step: int, following: int | None = None) -> StepData:
        """The data of a step of `Batches`; then starts to read that of step `following`. Raises DataError, also of what the thread
        met earlier, if the store cannot be read."""
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
        """Ends the thread, without waiting for what it reads. `take` starts another one."""
        executor, self._executor, self._ahead = self._executor, None, None
        if executor is not None:
            executor.shutdown(wait=False, cancel_futures=True)

    def _submit(self, step: int) -> "Future[StepData]":
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "boost-data", initializer=self._enter_thread)
        return self._executor.submit(self._read, step)

    def _enter_thread(self) -> None:
        # A new thread is on GPU 0, where pinning memory would make a context for every process of the machine.
        if self._mesh.device.type == "cuda":
            torch.cuda.set_device(self._mesh.device)

    def _read(self, step: int) -> StepData:
        dp, train = self._mesh.dp, self._config.train
        return self.read(step, share(train.global_batch // train.micro_batch, dp.rank, dp.size))

    def read(self, step: int, numbers: Sequence[int]) -> StepData:
        """These micro-batches of a step, by number, now. Raises DataError."""
        config, cp = self._config, self._mesh.cp
        each = self._batches.numbered(step, numbers, config.train.micro_batch)
        found = [batch.share(cp.rank, cp.size) for batch in each]
        targets = sum(int((batch.targets != IGNORED).sum()) for batch in found)
        whole = [join(found)] if config.parallel.pp > 1 and found else found
        pin = self._mesh.device.type == "cuda"
        return StepData([host_batch(batch, pin) for batch in whole], len(found), targets)
