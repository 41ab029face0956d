"""The passes of a step as one CUDA graph: the host records what a step launches, once, and then launches all of it in one call.

A graph repeats the same operations on the same memory. Micro-batches are therefore copied to tensors that stay where they are.
Weights are updated in place. The loss and the gradients are in the graph's memory pool, where each replay overwrites them.
"""

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from boost.config import Config
from boost.config.rules import graph_problems
from boost.errors import ConfigError, TrainingError
from boost.models.fused import FusedParam
from boost.parallel.exchange import LastExchange, last_exchanges
from boost.train.hardware import idle_in_graphs
from boost.train.heartbeat import recorder_unread
from boost.train.prefetch import HostBatch

log = logging.getLogger("boost")

WARM_UP = 3
"""Steps before the capture: they compile kernels, choose them by timing, and create communicators. torch's
make_graphed_callables and Megatron-LM use three, too."""

RunPasses = Callable[[Sequence[HostBatch], int], Tensor]
"""Runs the passes on batches (on the host or the device) of so many micro-batches. Sets the gradients and returns the loss."""


class CudaGraph:
    """torch's CUDA graph: operations that are recorded once and run many times, with a memory pool of its own."""

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Context manager that records what this process launches, on a side stream, without running it. Restarts torch's count of
        the peak of allocated memory, which includes what the capture allocates."""
        # By default, a capture fails if another thread queries an event or pins memory meanwhile, as the prefetcher does.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            yield
        pool = [part for part in torch.cuda.memory_snapshot() if tuple(part["segment_pool_id"]) == self._graph.pool()]
        idle_in_graphs[self] = sum(part["total_size"] - part["allocated_size"] for part in pool)
        torch.cuda.reset_peak_memory_stats()

    def replay(self) -> None:
        """Launches everything recorded, on the current stream."""
        self._graph.replay()


GRAPHS: dict[str, type[CudaGraph]] = {"cuda": CudaGraph}
"""Graphs by device type."""


class CapturedPasses:
    """Captures passes after WARM_UP steps and replays them from then on. They are captured again if a shape changes or a weight
    moves. A replay runs none of the passes' Python code, such as hooks on modules."""

    def __init__(self, passes: RunPasses, fused_params: Sequence[FusedParam], device: torch.device) -> None:
        self.passes, self._fused_params, self._device = passes, fused_params, device
        self._captured_for: list[object] = []
        """Shapes of the batches and addresses of the weights."""
        self._warm_up = 0
        """Steps left before the capture."""
        self._calls = 0
        self._graph: CudaGraph | None = None
        self._inputs: list[HostBatch] = []
        self._gradients: list[Tensor | None] = []
        self._loss = torch.empty(0)

    def __call__(self, batches: Sequence[HostBatch], micro_batches: int) -> Tensor:
        """Like the passes. A later call overwrites the loss and the gradients. Raises TrainingError if a capture fails."""
        needed = [*(batch.tokens.shape for batch in batches), *(f.tensor.data_ptr() for f in self._fused_params)]
        self._calls += 1
        if needed != self._captured_for:
            self._captured_for, self._warm_up = needed, WARM_UP
            self._graph, self._gradients = None, []  # frees the memory of an earlier graph
        if self._warm_up:
            self._warm_up -= 1
            return self.passes(batches, micro_batches)
        if self._graph is None:
            self._graph = self._capture(batches, micro_batches)
        for inputs, batch in zip(self._inputs, batches, strict=True):
            for static, x in zip(inputs, batch, strict=True):
                static.copy_(x, non_blocking=True)
        for fused, gradient in zip(self._fused_params, self._gradients, strict=True):
            fused.tensor.grad = gradient
        # Neither c10d nor NCCL's watchdog sees the collectives of a replay, so heartbeats compare the replays.
        last_exchanges["graph"] = LastExchange("CUDA graph", self._calls, "all", 0, time.time_ns())
        self._graph.replay()
        return self._loss

    def _capture(self, batches: Sequence[HostBatch], micro_batches: int) -> CudaGraph:
        self._inputs = [HostBatch(*(torch.empty_like(x, device=self._device) for x in batch)) for batch in batches]
        for fused in self._fused_params:
            fused.tensor.grad = None
        gc.collect()  # so that reference cycles hold no memory of the last steps
        graph = GRAPHS[self._device.type]()
        try:
            with recorder_unread(), graph.capture():
                self._loss = self.passes(self._inputs, micro_batches)
        except RuntimeError as error:
            cause = error.__context__ or error  # the end of a spoiled capture raises a second error
            if isinstance(cause, torch.OutOfMemoryError):
                raise cause from None
            reason = str(cause).strip().partition("\n")[0]
            raise TrainingError(
                f"train.cuda_graphs = 'on': the passes of a step cannot be captured ({reason}); set it to 'off'"
            ) from error
        self._gradients = [fused.tensor.grad for fused in self._fused_params]
        return graph


def captured_if_configured(
    passes: RunPasses, config: Config, fused_params: Sequence[FusedParam], device: torch.device
) -> RunPasses:
    """The passes, captured as train.cuda_graphs says. Raises ConfigError if they should be but cannot be."""
    problem = next(graph_problems(config), "")
    if device.type not in GRAPHS:
        problem = f"train.cuda_graphs = 'on' needs a GPU, but the device is '{device.type}'; set it to 'off'"
    if config.captures_passes and problem:
        raise ConfigError(problem)
    if config.captures_passes:
        return CapturedPasses(passes, fused_params, device)
    if config.train.cuda_graphs == "auto" and device.type in GRAPHS:
        log.info("no CUDA graphs: %s", problem or "train.cuda_graphs = 'auto' does not use them")
    return passes
