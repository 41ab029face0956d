"""Every collective of a forward or backward pass, as a differentiable function. The only file that names torch's ops.

Built on functional collectives (in-place ones give silently wrong gradients under selective checkpointing). Their names in
`torch.ops._c10d_functional` are stable from torch 2.3 on. Legend: p processes of the group; T tokens; "local" is this
process's shard. Bytes are what one process sends: 2N(p-1)/p for an all-reduce of N bytes, N(p-1)/p for an all-gather or
reduce-scatter of N bytes (gathered size).
"""

from typing import Any

import torch
from torch import Tensor

from boost.parallel.mesh import Axis

_ops = torch.ops._c10d_functional


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """Sum over the axis, without a gradient. One all-reduce of x."""
    assert axis.group is not None
    return _ops.wait_tensor(_ops.all_reduce(x, "sum", axis.group.group_name))


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """[n, ...] of every process stacked to [p * n, ...], without a gradient. One all-gather."""
    assert axis.group is not None
    return _ops.wait_tensor(_ops.all_gather_into_tensor(x.contiguous(), axis.size, axis.group.group_name))


def reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    """[p * n, ...] summed over the axis, this process's [n, ...] of it, without a gradient. One reduce-scatter."""
    assert axis.group is not None
    return _ops.wait_tensor(_ops.reduce_scatter_tensor(x.contiguous(), "sum", axis.size, axis.group.group_name))


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


class _GatherFeatures(torch.autograd.Function):
    """forward: [T, D/p] -> [T, D] (one all-gather); dgrad: [T, D] terms of a sum -> [T, D/p] (one reduce-scatter)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return gather_features(x, axis)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        axis = ctx.axis
        tokens, width = dy.shape
        by_process = dy.view(tokens, axis.size, width // axis.size).transpose(0, 1).reshape(axis.size * tokens, -1)
        return reduce_scatter(by_process, axis), None


def gather_features(x: Tensor, axis: Axis) -> Tensor:
    """[T, D/p] of every process side by side, [T, D], without a gradient. One all-gather."""
    tokens = x.shape[0]
    return all_gather(x, axis).view(axis.size, tokens, -1).transpose(0, 1).reshape(tokens, -1)


def sum_forward(x: Tensor, axis: Axis) -> Tensor:
    """Differentiable: all-reduce forward, identity backward."""
    return _SumForward.apply(x, axis)


def sum_backward(x: Tensor, axis: Axis) -> Tensor:
    """Differentiable: identity forward, all-reduce backward."""
    return _SumBackward.apply(x, axis)


def sum_both(x: Tensor, axis: Axis) -> Tensor:
    """Differentiable: all-reduce forward and backward."""
    return _SumBoth.apply(x, axis)


def gather_features_reduce(x: Tensor, axis: Axis) -> Tensor:
    """Differentiable: all-gather of feature shards forward, reduce-scatter of partial gradients backward."""
    return _GatherFeatures.apply(x, axis)
