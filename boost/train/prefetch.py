"""The data for a step: batches as tensors, on the host and on the device, read ahead."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from boost.config import Config
from boost.config.architecture import IGNORED
from boost.data.batches import Batch, Batches, join
from boost.errors import UnreadableDataError
from boost.parallel.mesh import Mesh, share


class HostBatch(NamedTuple):
    """A batch as tensors in host memory: `tokens` and `targets` [B, S] int64, `document_ids` [B, S] int32."""

    tokens: Tensor
    targets: Tensor
    document_ids: Tensor


def host_batch(batch: Batch, pin: bool = False) -> HostBatch:
    """The batch as tensors that share its memory. With `pin`, copies them to pinned memory, for asynchronous copies to a GPU."""
    tensors = (torch.from_numpy(x) for x in (batch.tokens, batch.targets, batch.document_ids))
    return HostBatch(*(x.pin_memory() if pin else x for x in tensors))


def to_device(batch: Batch | HostBatch, isolate: bool, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
    """A batch's decoder inputs: (tokens, targets, document ids). The ids stay on the host, and are None unless `isolate` is set."""
    host = batch if isinstance(batch, HostBatch) else host_batch(batch)
    tokens, targets = (x.to(device, non_blocking=True) for x in (host.tokens, host.targets))
    return tokens, targets, host.document_ids if isolate else None


@dataclass(frozen=True)
class StepData:
    """One process's data for one step."""

    batches: list[HostBatch]
    """Micro-batches, in order; with pipeline parallelism, one batch that concatenates them."""
    micro_batches: int
    targets: int
    """Number of targets."""


class Prefetcher:
    """Reads this process's data for any step, and prefetches the data for the next steps.

    The data for a step depends only on the step's number, so data prefetched for another step is discarded. Each object
    reads in its own thread; on GPUs, it reads into pinned memory, so that copies to the device are asynchronous.
    """

    def __init__(self, batches: Batches, config: Config, mesh: Mesh) -> None:
        self._batches, self._config, self._mesh = batches, config, mesh
        self._executor: ThreadPoolExecutor | None = None
        self._ahead: dict[int, Future[StepData]] = {}
        """Reads by step, in order."""

    def take(self, step: int, following: Sequence[int] = ()) -> StepData:
        """Returns the data for a step from `Batches`, and starts to prefetch the data for the steps `following`.

        Raises DataError if the store could not be read, even if the error occurred during prefetching."""
        for dropped in self._ahead.keys() - {step, *following}:
            self._ahead.pop(dropped).cancel()
        for number in (step, *following):
            if number not in self._ahead:
                self._ahead[number] = self._submit(number)
        return self._ahead.pop(step).result()

    def failure(self, stopped: Callable[[], bool]) -> UnreadableDataError | None:
        """Why a step that was prefetched cannot be read; None if all can. Waits for them, until `stopped`.

        The request to stop that follows arrives before anyone waits for these data: with `Stepper.ahead`, which launches the next
        step's passes first, two steps are prefetched."""
        for future in self._ahead.values():
            while not future.done() and not stopped():
                wait([future], timeout=1.0)
            if future.done() and isinstance(error := future.exception(), UnreadableDataError):
                return error
        return None

    def close(self) -> None:
        """Ends the thread without waiting for a read in progress. `take` starts a new one."""
        executor, self._executor, self._ahead = self._executor, None, {}
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
