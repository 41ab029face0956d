"""Single-rank emulation of TP: the work of one TP process, with torch's fake process group replacing the other processes.

Nothing is sent. Collectives return the process's own data (a gather repeats its shard, a reduction has one term), so that GEMMs see
realistic values instead of zeros or uninitialized memory.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from boost.config.schema import Config, ParallelConfig
from boost.measure.steps import Prediction, prediction
from boost.parallel import collectives
from boost.parallel import mesh as meshes
from boost.parallel.mesh import Mesh, mesh_of
from boost.plan.hardware import Hardware, Link
from boost.plan.step_time import CONTEXT, REPLICAS, TENSOR, StepTime

FREE = Link(name="none", latency_us=0.0, gb_s=1e12)
"""A link on which sending takes no time."""


@contextlib.contextmanager
def without_the_others(parallel: ParallelConfig, device: torch.device) -> Iterator[Mesh]:
    """Context manager that provides rank 0's mesh of `parallel` in a process without a process group."""
    # Imported here because torch's fake process group is part of its testing internals.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=parallel.world_size, store=FakeStore())
    used: Any = collectives
    usual = used._ops, used.RECEIVES_FIRST, meshes._backend
    try:
        meshes._backend = lambda device: None
        used.RECEIVES_FIRST = set()  # no other processes send messages
        used._ops = _LocalCollectives()
        yield mesh_of(parallel, device)
    finally:
        used._ops, used.RECEIVES_FIRST, meshes._backend = usual
        dist.destroy_process_group()


def share_prediction(config: Config, hardware: Hardware) -> Prediction:
    """Predicts a step of an emulated rank, which waits for no collectives and does not share the device."""
    free = {"speeds": hardware.speeds_of(1), "node": FREE, "network": FREE}
    return prediction(config, hardware.model_copy(update=free))


def exposed_collectives(step: StepTime) -> float:
    """Seconds of a step in TP and DP collectives that do not overlap with computation."""
    return sum(step.parts.get(part, 0.0) for part in (TENSOR, CONTEXT, REPLICAS))


class _LocalCollectives:
    """Replaces torch's functional collectives: calls them, then fills their results with the process's own data. torch's fake
    group also does this, but not in every version, and not always in the same way."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.ops._c10d_functional, name)

    def all_gather_into_tensor(self, x: Tensor, size: int, group: str) -> Tensor:
        """[n, ...] -> [p n, ...]: repeats x p times."""
        gathered: Tensor = torch.ops._c10d_functional.all_gather_into_tensor(x, size, group)
        gathered.view(size, *x.shape).copy_(x)
        return gathered

    def reduce_scatter_tensor(self, x: Tensor, op: str, size: int, group: str) -> Tensor:
        """[p n, ...] -> [n, ...]: the first n rows, which belong to process 0."""
        summed: Tensor = torch.ops._c10d_functional.reduce_scatter_tensor(x, op, size, group)
        return summed.copy_(x.narrow(0, 0, summed.shape[0]))

    def all_to_all_single(self, x: Tensor, received: list[int], sent: list[int], group: str) -> Tensor:
        """[p n, ...] -> [p n, ...]: repeats the first n rows p times. Counts are equal, as in `collectives.all_to_all`."""
        exchanged: Tensor = torch.ops._c10d_functional.all_to_all_single(x, received, sent, group)
        exchanged.view(len(sent), sent[0], *x.shape[1:]).copy_(x[: sent[0]])
        return exchanged
