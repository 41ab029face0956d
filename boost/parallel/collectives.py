"""Every collective of a forward or backward pass, as a differentiable function. The only file that names torch's ops.

Built on functional collectives (in-place ones give silently wrong gradients under selective checkpointing). Their names in
`torch.ops._c10d_functional` are stable from torch 2.3 on, and torch.compile traces them; on CPUs, their like in `exchange.py`.
Legend: p processes of the group; n rows of this process, D width. Bytes are what one process sends: 2N(p-1)/p for an all-reduce
of N bytes, N(p-1)/p for an all-gather or reduce-scatter of N bytes (gathered size) and an all-to-all of N bytes (local size).

| collective | forward | backward | for |
|---|---|---|---|
| `SUM_FORWARD` | all-reduce | identity | partial sums whose result every process uses alike: dy is complete and equal |
| `SUM_BACKWARD` | identity | all-reduce | a replicated tensor of which every process uses a different shard of what follows |
| `SUM_BOTH` | all-reduce | all-reduce | a partial sum of which every process then uses its own share |
| `GATHER` | all-gather [n, D] -> [p n, D] | reduce-scatter | shards that all need whole, each for a different share |
| `GATHER_REPLICATED` | all-gather [n, D] -> [p n, D] | own rows | shards that all need whole and use alike |
| `SCATTER_SUM` | reduce-scatter [p n, D] -> [n, D] | all-gather | partial sums of which each continues with its own rows |
| `EXCHANGE` | all-to-all [p n, D] -> [p n, D] | all-to-all | rows for every process against rows from every process |

Each is also a pair, `start(SUM_FORWARD, x, axis)` and `InFlight.wait()`, with local work in between. In the backward pass the
gradient of `wait` starts the gradient's collective, and the gradient of `start` waits for it: autograd runs nodes in the
reverse order of their creation, so what was interleaved forward is interleaved backward.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import boost.parallel.exchange  # noqa: F401  defines torch.ops.boost
from boost.config.layouts.spec import (
    GATHER,
    SUM_BACKWARD,
    SUM_BOTH,
    Comm,
)
from boost.config.traffic import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER
from boost.parallel.mesh import Axis

_ops = torch.ops._c10d_functional


# Started, not waited for; without a gradient.


def begin_all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """Sum over the axis, without a gradient; `wait` must come before the result is used."""
    x = x.contiguous()
    # A ring of more processes does not suffer from gloo's order.
    if receives_first(x.device) and axis.size == 2 and not axis.recoverable:
        return torch.ops.boost.all_reduce(x, _at_once(), axis.name)
    return _ops.all_reduce(x, "sum", axis.name)


def _start_all_gather(x: Tensor, axis: Axis) -> Tensor:
    """[n, ...] of every process stacked to [p * n, ...]."""
    x = x.contiguous()
    if receives_first(x.device):
        return torch.ops.boost.all_gather(x, axis.size, _at_once(), axis.name)
    return _ops.all_gather_into_tensor(x, axis.size, axis.name)


def _start_reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    """[p * n, ...] summed over the axis, this process's [n, ...] of it."""
    x = x.contiguous()
    if receives_first(x.device):
        return torch.ops.boost.reduce_scatter(x, axis.size, _at_once(), axis.name)
    return _ops.reduce_scatter_tensor(x, "sum", axis.size, axis.name)


def _start_all_to_all(x: Tensor, axis: Axis) -> Tensor:
    """[p * n, ...], the j-th n rows for process j -> [p * n, ...], the j-th n rows from process j."""
    x = x.contiguous()
    if receives_first(x.device):
        return torch.ops.boost.all_to_all(x, axis.size, _at_once(), axis.name)
    counts = [x.shape[0] // axis.size] * axis.size
    return _ops.all_to_all_single(x, counts, counts, axis.name)


def receives_first(device: torch.device) -> bool:
    """Whether collectives are those of `boost.parallel.exchange`: on CPUs, where gloo's own send before they receive."""
    return device.type == "cpu"


def _at_once() -> bool:
    """In compiled code, buffers that no kernel reads any more are used again, whatever is in flight."""
    return torch.compiler.is_compiling()


def wait(x: Tensor) -> Tensor:
    """The result of a collective that was started."""
    return _ops.wait_tensor(x)


_START: dict[str, Callable[[Tensor, Axis], Tensor]] = {
    ALL_REDUCE: begin_all_reduce,
    ALL_GATHER: _start_all_gather,
    REDUCE_SCATTER: _start_reduce_scatter,
    ALL_TO_ALL: _start_all_to_all,
}


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """Sum over the axis, without a gradient. One all-reduce of x."""
    return wait(begin_all_reduce(x, axis))


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """[n, ...] of every process stacked to [p * n, ...], without a gradient. One all-gather."""
    return wait(_start_all_gather(x, axis))


def reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    """[p * n, ...] summed over the axis, this process's [n, ...] of it, without a gradient. One reduce-scatter."""
    return wait(_start_reduce_scatter(x, axis))


def all_to_all(x: Tensor, axis: Axis) -> Tensor:
    """[p * n, ...], the j-th n rows for process j -> [p * n, ...], the j-th n rows from process j. One all-to-all."""
    return wait(_start_all_to_all(x, axis))


def start_all_reduce(x: Tensor, axis: Axis) -> None:
    """Begins to sum x over the axis in place, without a gradient; `finish_all_reduce` must come before x is used."""
    _ops.all_reduce_(x, "sum", axis.name)


def finish_all_reduce(x: Tensor) -> None:
    """Waits for the sum that `start_all_reduce` began."""
    wait(x)


# Differentiable.


def _forward(comm: Comm, x: Tensor, axis: Axis) -> Tensor:
    return x.view_as(x) if comm.forward is None else _START[comm.forward](x, axis)


def _backward(comm: Comm, dy: Tensor, axis: Axis) -> Tensor:
    if comm.backward is not None:
        return _START[comm.backward](dy, axis)
    if comm.forward != ALL_GATHER:
        return dy
    rows = dy.shape[0] // axis.size  # complete and equal on every process
    return dy.narrow(0, axis.rank * rows, rows)


class _Comm(torch.autograd.Function):
    """forward: the forward collective of `comm`, waited for; dgrad: its backward collective, waited for. Shapes: the table."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, axis: Axis, begun: bool = False) -> Tensor:
        ctx.comm, ctx.axis, ctx.begun = comm, axis, begun
        y = _forward(comm, x, axis)
        return y if comm.forward is None else wait(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        dx = dy if ctx.begun else _backward(ctx.comm, dy, ctx.axis)
        return dx if ctx.comm.backward is None else wait(dx), None, None, None


class _Start(torch.autograd.Function):
    """forward: starts the forward collective -> (x, what was started); dgrad: waits for the gradient's, which `_Wait` started.

    x is returned for the graph only: its gradient has the shape of x, which that of what was started need not have.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, axis: Axis) -> tuple[Tensor, Tensor]:
        ctx.comm = comm
        started = _forward(comm, x, axis)
        ctx.mark_non_differentiable(started)
        return x.view_as(x), started

    @staticmethod
    def backward(ctx: Any, dx: Tensor, _: Any) -> tuple[Tensor, None, None]:
        return dx if ctx.comm.backward is None else wait(dx), None, None


class _Wait(torch.autograd.Function):
    """forward: waits; dgrad: starts the backward collective of what `_Start` sent. The result is a view of what was started."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, started: Tensor, comm: Comm, axis: Axis, begun: bool) -> Tensor:
        ctx.comm, ctx.axis, ctx.begun = comm, axis, begun
        y = started if comm.forward is None else wait(started)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None, None]:
        return dy if ctx.begun else _backward(ctx.comm, dy, ctx.axis), None, None, None, None


class InFlight:
    """A differentiable collective that was started: `wait` returns its result, once."""

    __slots__ = ("wait",)

    def __init__(self, wait: Callable[[], Tensor]) -> None:
        self.wait = wait


def start(comm: Comm, x: Tensor, axis: Axis, begun: bool = False) -> InFlight:
    """Starts a differentiable collective of the table, to be waited for later, in both passes. `begun`: whoever takes the result
    starts the backward collective itself, and hands the gradient over in flight."""
    sent, started = _Start.apply(x, comm, axis)
    return InFlight(lambda: _Wait.apply(sent, started, comm, axis, begun))


def run(comm: Comm, x: Tensor, axis: Axis, begun: bool = False) -> InFlight:
    """A differentiable collective of the table, waited for immediately in both passes: one autograd node instead of two.
    `begun`: as of `start`."""
    y = _Comm.apply(x, comm, axis, begun)
    return InFlight(lambda: y)


def sum_backward(x: Tensor, axis: Axis) -> Tensor:
    """Differentiable: identity forward, all-reduce backward."""
    return _Comm.apply(x, SUM_BACKWARD, axis)


def sum_both(x: Tensor, axis: Axis) -> Tensor:
    """Differentiable: all-reduce forward and backward."""
    return _Comm.apply(x, SUM_BOTH, axis)


def gather(x: Tensor, axis: Axis) -> Tensor:
    """Differentiable: [n, D] of every process stacked to [p n, D]; reduce-scatter of partial gradients backward."""
    return _Comm.apply(x, GATHER, axis)


def features_to_rows(parts: Sequence[Tensor], axis: Axis) -> Tensor:
    """[n, p w] each -> [p n, sum of w]: the features of process j, of all parts side by side, in the j-th n rows. A copy."""
    rows = parts[0].shape[0]
    shares = [x.reshape(rows, axis.size, -1).transpose(0, 1) for x in parts]
    joined = shares[0] if len(shares) == 1 else torch.cat(shares, dim=-1)
    return joined.reshape(axis.size * rows, -1)


def rows_to_features(x: Tensor, axis: Axis) -> Tensor:
    """[p T, D/p], p shards of the features one below the other -> [T, D], side by side. A copy."""
    tokens = x.shape[0] // axis.size
    return x.view(axis.size, tokens, -1).transpose(0, 1).reshape(tokens, -1)


def heads_for_each(x: Tensor, heads: int, processes: int) -> Tensor:
    """[n, heads E] -> [n, max(heads, processes) E]: each process's heads side by side; one that several need, once for each.

    A copy where there are fewer heads than processes.
    """
    if heads >= processes:
        return x
    return x.unflatten(-1, (heads, -1)).repeat_interleave(processes // heads, dim=1).flatten(1)
