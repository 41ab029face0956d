"""Process groups on CPUs that complete asynchronously, as NCCL's do: a result is NaN until code waits for it.

gloo's collectives often finish before anyone reads the result, so code that forgets to wait passes its tests on CPUs and trains on
garbage on GPUs. Under `late_groups`, the groups of a mesh

- deliver a result when code waits for it, and fill its memory with NaN (or the largest integer) until then;
- read the sent buffer until then: writing to it earlier is an error;
- accept what NCCL accepts: contiguous tensors of a supported dtype, and equal counts on all processes;
- record every collective: those that were never waited for (`never_waited`), and the order within a group (`orders`), which must be
  the same on all its processes.

Collectives take the GPU code path: torch's functional collectives, not `boost.parallel.collectives`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work

import boost.parallel.mesh as mesh_module
from boost.parallel import collectives
from tests import toy

BACKEND = "late"
OF_NCCL = {
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.uint8, torch.int8),
}
"""Dtypes that NCCL sends."""

orders: dict[str, list[tuple[Any, ...]]] = {}
"""By group: (operation, shape, dtype) of every collective, in order."""

in_flight: dict[int, str] = {}
"""Collectives issued but not waited for, by id of their work."""


class LateWork(Work):
    """A collective in flight; the real one runs between copies."""

    def __init__(self, what: str, real: Any, sent: Sequence[Tensor], outputs: Sequence[Tensor], made: Sequence[Tensor]):
        super().__init__()
        self.what, self.real, self.outputs, self.made = what, real, outputs, made
        own = {each.untyped_storage().data_ptr() for each in outputs}
        self.sent = [(x, x.clone()) for x in sent if x.untyped_storage().data_ptr() not in own]
        in_flight[id(self)] = what

    def wait(self, timeout: Any = None) -> bool:
        if id(self) not in in_flight:
            return True
        self.real.wait()
        for now, then in self.sent:
            assert torch.equal(now, then), f"{self.what}: its input was changed before it was waited for"
        for output, made in zip(self.outputs, self.made, strict=True):
            output.data.copy_(made)
        del in_flight[id(self)]
        return True

    def is_completed(self) -> bool:
        return id(self) not in in_flight


class LateGroup(dist.ProcessGroup):
    """A process group that wraps a gloo group."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # as torch's own subclasses do
        self.gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self.label, self.what = "", ""

    def _get_backend(self, device: torch.device) -> Any:
        return self.gloo

    def getBackendName(self) -> str:
        return BACKEND

    def getGroupName(self) -> str:
        return self.label

    def setGroupName(self, name: str) -> None:
        self.label = name

    def getGroupDesc(self) -> str:
        return self.what

    def setGroupDesc(self, what: str) -> None:
        self.what = what

    def _issue(
        self,
        operation: str,
        sent: Sequence[Tensor],
        outputs: Sequence[Tensor],
        run: Callable[..., Any],
        ordered: bool = True,
    ) -> Work:
        """`run` gets copies of the inputs, and memory for the outputs. Tensors summed in place are both."""
        for x in (*sent, *outputs):
            assert x.is_contiguous(), f"{operation}: NCCL wants contiguous tensors, not {tuple(x.shape)} {x.stride()}"
            assert x.dtype in OF_NCCL, f"{operation}: NCCL does not send {x.dtype}"
        what = f"{operation} {[tuple(x.shape) for x in (sent or outputs)]} of {self.group_desc or self.size()}"
        if ordered:
            facts = operation, *((tuple(x.shape), str(x.dtype)) for x in (sent or outputs))
            orders.setdefault(self.group_name, []).append(facts)
        copies, made = ([x.detach().cpu().clone() for x in side] for side in (sent, outputs))  # gloo's are on the host
        work = LateWork(what, run(copies, made), sent, outputs, made)
        for output in outputs:
            output.data.fill_(float("nan") if output.is_floating_point() else torch.iinfo(output.dtype).max)
        return work

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        assert opts is None or opts.reduceOp != dist.ReduceOp.PREMUL_SUM, "a scaled sum of bf16 is zero on NCCL"
        return self._issue("all_reduce", [], tensors, lambda _, made: self.gloo.allreduce(made, opts))

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Work:
        return self._issue("broadcast", [], tensors, lambda _, made: self.gloo.broadcast(made, opts))

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        return self._issue("all_gather", inputs, outputs[0], lambda sent, made: self.gloo.allgather([made], sent))

    def _allgather_base(self, output: Tensor, x: Tensor, opts: Any = None) -> Work:
        return self._issue("all_gather", [x], [output], lambda sent, made: self.gloo._allgather_base(made[0], sent[0]))

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        (output,), (x,) = outputs, inputs
        return self._allgather_base(output, x)

    def _reduce_scatter_base(self, output: Tensor, x: Tensor, opts: Any = None) -> Work:
        assert opts is None or opts.reduceOp != dist.ReduceOp.PREMUL_SUM, "a scaled sum of bf16 is zero on NCCL"

        def run(sent: list[Tensor], made: list[Tensor]) -> Any:
            return self.gloo._reduce_scatter_base(made[0], sent[0], dist.ReduceScatterOptions())

        return self._issue("reduce_scatter", [x], [output], run)

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        (output,), (x,) = outputs, inputs
        return self._reduce_scatter_base(output, x, opts)

    def alltoall_base(self, output: Tensor, x: Tensor, received: list[int], sent: list[int], opts: Any = None) -> Work:
        assert len({*received, *sent}) <= 1, "all processes must send the same amount to each other"
        return self._issue(
            "all_to_all", [x], [output], lambda s, made: self.gloo.alltoall_base(made[0], s[0], received, sent)
        )

    # Their names from torch 2.13 on.
    all_gather_single, reduce_scatter_single, all_to_all_single = _allgather_base, _reduce_scatter_base, alltoall_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def barrier(self, opts: Any = None) -> Work:
        return self.gloo.barrier()

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> Work:
        return self._issue("send", tensors, [], lambda sent, _: self.gloo.send(sent, to, tag), ordered=False)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Work:
        return self._issue("recv", [], tensors, lambda _, made: self.gloo.recv(made, source, tag), ordered=False)


if BACKEND.upper() not in dist.Backend._plugins:
    dist.Backend.register_backend(BACKEND, LateGroup, devices=["cpu", "cuda"])


@contextmanager
def late_groups() -> Iterator[None]:
    """Meshes created in this context have late groups, and collectives take the GPU code path."""
    toy.mesh.cache_clear()
    orders.clear()
    in_flight.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mesh_module, "_backend", lambda device: BACKEND)
        patch.setattr(collectives, "RECEIVES_FIRST", set())
        try:
            yield
        finally:
            toy.mesh.cache_clear()


def never_waited() -> list[str]:
    """What was issued and not waited for."""
    return sorted(in_flight.values())
