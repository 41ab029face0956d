"""Every collective of a forward or backward pass, as a differentiable function. The only file that names torch's ops.

Built on functional collectives (in-place ones give silently wrong gradients under selective checkpointing). Their names in
`torch.ops._c10d_functional` are stable from torch 2.3 on, and torch.compile traces them. Legend: p processes of the group;
T tokens; D width; "local" is this process's shard. Bytes are what one process sends: 2N(p-1)/p for an all-reduce of N
bytes, N(p-1)/p for an all-gather or reduce-scatter of N bytes (gathered size) and an all-to-all of N bytes (local size).

| function | forward | backward |
|---|---|---|
| `sum_forward` | all-reduce | identity |
| `sum_backward` | identity | all-reduce |
| `sum_both` | all-reduce | all-reduce |
| `gather` | all-gather | reduce-scatter |
| `gather_replicated` | all-gather | own slice |
| `scatter_sum` | reduce-scatter | all-gather |
| `exchange` | all-to-all | all-to-all |
"""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from boost.parallel.mesh import Axis

_ops = torch.ops._c10d_functional


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """Sum over the axis, without a gradient. One all-reduce of x."""
    return _ops.wait_tensor(_ops.all_reduce(x, "sum", axis.name))


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """[n, ...] of every process stacked to [p * n, ...], without a gradient. One all-gather."""
    return _ops.wait_tensor(_ops.all_gather_into_tensor(x.contiguous(), axis.size, axis.name))


def reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    """[p * n, ...] summed over the axis, this process's [n, ...] of it, without a gradient. One reduce-scatter."""
    if x.device.type == "cpu":
        return _reduce_scatter_on_cpu(x.contiguous(), axis.size, axis.name)
    return _ops.wait_tensor(_ops.reduce_scatter_tensor(x.contiguous(), "sum", axis.size, axis.name))


@torch.library.custom_op("boost::reduce_scatter", mutates_args=())
def _reduce_scatter_on_cpu(x: Tensor, processes: int, group: str) -> Tensor:
    """The same over gloo, whose own one takes as long as its all-reduce: rows go straight to the process that sums them.

    As many bytes are sent, about half the time is taken, and sums of bf16 are rounded once. One operation, so that whoever
    counts sees one reduce-scatter.
    """
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=dist.distributed_c10d._resolve_process_group(cast(Any, group)))
    return received.view(processes, x.shape[0] // processes, *x.shape[1:]).sum(0)


@_reduce_scatter_on_cpu.register_fake
def _(x: Tensor, processes: int, group: str) -> Tensor:
    return x.new_empty(x.shape[0] // processes, *x.shape[1:])


def all_to_all(x: Tensor, axis: Axis) -> Tensor:
    """[p * n, ...], the j-th n rows for process j -> [p * n, ...], the j-th n rows from process j. One all-to-all."""
    counts = [x.shape[0] // axis.size] * axis.size
    return _ops.wait_tensor(_ops.all_to_all_single(x.contiguous(), counts, counts, axis.name))


def start_all_reduce(x: Tensor, axis: Axis) -> None:
    """Begins to sum x over the axis in place, without a gradient; `finish_all_reduce` must come before x is used."""
    _ops.all_reduce_(x, "sum", axis.name)


def finish_all_reduce(x: Tensor) -> None:
    """Waits for the sum that `start_all_reduce` began."""
    _ops.wait_tensor(x)


class _SumForward(torch.autograd.Function):
    """forward: y = sum over processes of x (one all-reduce); dgrad: dx = dy, no collective.

    For partial sums whose result every process uses alike: dy is complete and equal on every process.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return all_reduce(x, axis)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


class _SumBackward(torch.autograd.Function):
    """forward: y = x, no collective; dgrad: dx = sum over processes of dy (one all-reduce).

    For a replicated tensor of which every process uses a different shard of what follows: dy is one term of dx.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return all_reduce(dy.contiguous(), ctx.axis), None


class _SumBoth(torch.autograd.Function):
    """forward: y = sum of x (one all-reduce); dgrad: dx = sum of dy (one all-reduce).

    For a partial sum of which every process then uses its own share, so that both x and dy are terms of a sum.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return all_reduce(x, axis)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return all_reduce(dy.contiguous(), ctx.axis), None


class _Gather(torch.autograd.Function):
    """forward: [n, D] -> [p n, D] (one all-gather); dgrad: [p n, D], a term of a sum -> [n, D] (one reduce-scatter).

    For shards that every process needs whole, each for a different share of what follows.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return all_gather(x, axis)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(dy, ctx.axis), None


class _GatherReplicated(torch.autograd.Function):
    """forward: [n, D] -> [p n, D] (one all-gather); dgrad: [p n, D] -> this process's [n, D] of it, no collective.

    For shards that every process needs whole and uses alike: dy is complete and equal on every process.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return all_gather(x, axis)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        rows = dy.shape[0] // ctx.axis.size
        return dy.narrow(0, ctx.axis.rank * rows, rows), None


class _ScatterSum(torch.autograd.Function):
    """forward: [p n, D], a term of a sum -> [n, D] (one reduce-scatter); dgrad: [n, D] -> [p n, D] (one all-gather).

    For partial sums of which every process goes on with its own rows.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return reduce_scatter(x, axis)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return all_gather(dy, ctx.axis), None


class _Exchange(torch.autograd.Function):
    """forward: [p n, D], rows for every process -> [p n, D], rows from every process (one all-to-all); dgrad: the same."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return all_to_all(x, axis)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return all_to_all(dy, ctx.axis), None


def sum_forward(x: Tensor, axis: Axis) -> Tensor:
    """Differentiable: all-reduce forward, identity backward."""
    return _SumForward.apply(x, axis)


def sum_backward(x: Tensor, axis: Axis) -> Tensor:
    """Differentiable: identity forward, all-reduce backward."""
    return _SumBackward.apply(x, axis)


def sum_both(x: Tensor, axis: Axis) -> Tensor:
    """Differentiable: all-reduce forward and backward."""
    return _SumBoth.apply(x, axis)


def gather(x: Tensor, axis: Axis) -> Tensor:
    """Differentiable: [n, D] of every process stacked to [p n, D]; reduce-scatter of partial gradients backward."""
    return _Gather.apply(x, axis)


def gather_replicated(x: Tensor, axis: Axis) -> Tensor:
    """Differentiable: [n, D] of every process stacked to [p n, D]; own rows of a complete gradient backward."""
    return _GatherReplicated.apply(x, axis)


def scatter_sum(x: Tensor, axis: Axis) -> Tensor:
    """Differentiable: own rows [n, D] of the sum of [p n, D]; all-gather of the gradient backward."""
    return _ScatterSum.apply(x, axis)


def exchange(x: Tensor, axis: Axis) -> Tensor:
    """Differentiable: [p n, D], the j-th n rows to process j, for the j-th n rows from process j; the same backward."""
    return _Exchange.apply(x, axis)


def rows_to_features(x: Tensor, axis: Axis) -> Tensor:
    """[p T, D/p], p shards of the features one below the other -> [T, D], side by side. A copy."""
    tokens = x.shape[0] // axis.size
    return x.view(axis.size, tokens, -1).transpose(0, 1).reshape(tokens, -1)
