"""Every collective in a forward or backward pass, as a differentiable function. Only this file names torch's collective ops.

They use functional collectives, because in-place collectives silently give wrong gradients under selective checkpointing. The op
names in `torch.ops._c10d_functional` have been stable since torch 2.3, and torch.compile traces the ops. `boost.parallel.exchange`
has equivalent ops for CPUs.

Legend: p processes in the group, n rows on this process, D width. One process sends 2N(p-1)/p bytes for an all-reduce of N bytes,
and N(p-1)/p bytes for an all-gather or reduce-scatter of N bytes (gathered size) or an all-to-all of N bytes (local size).

| collective | forward | backward | used for |
|---|---|---|---|
| `SUM_FORWARD` | all-reduce | identity | partial sums; every process uses the result the same way, so dy is complete and equal |
| `SUM_BACKWARD` | identity | all-reduce | a replicated tensor that feeds a different shard on every process |
| `SUM_BOTH` | all-reduce | all-reduce | a partial sum that then feeds a different shard on every process |
| `GATHER` | all-gather [n, D] -> [p n, D] | reduce-scatter | shards gathered for a different use on every process |
| `GATHER_REPLICATED` | all-gather [n, D] -> [p n, D] | own rows | shards gathered for the same use on every process |
| `SCATTER_SUM` | reduce-scatter [p n, D] -> [n, D] | all-gather | partial sums; each process continues with its own rows |
| `EXCHANGE` | all-to-all [p n, D] -> [p n, D] | all-to-all | rows for every process in exchange for rows from every process |

Each collective can also be split in two, `start(SUM_FORWARD, x, axis)` and `InFlight.wait()`, with local work in between. In
the backward pass, the gradient of `wait` starts the gradient's collective, and the gradient of `start` waits for it. Autograd
runs nodes in the reverse order of their creation, so work interleaved in the forward pass is also interleaved in the
backward pass.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from boost.config.layouts.spec import Comm
from boost.config.traffic import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER
from boost.models.kernels import Node
from boost.parallel import exchange
from boost.parallel.mesh import Axis

_ops = torch.ops._c10d_functional


# Non-differentiable.


def start_plain(kind: str, x: Tensor, axis: Axis) -> Tensor:
    """Starts a collective of this kind; `wait` returns its result. Shapes: `all_reduce` and the following functions.

    Compiled code reuses a buffer that no later kernel reads, even while a collective is in flight, so in compiled code, those
    of `boost.parallel.exchange` wait inside their op.
    """
    x = x.contiguous()
    if x.device.type in RECEIVES_FIRST and not (kind == ALL_REDUCE and (axis.size > 2 or not axis.point_to_point)):
        return exchange.OPS[kind](x, axis.size, torch.compiler.is_compiling(), axis.name)
    # Also on CPUs: gloo's send-before-receive order does not slow down rings of more than two processes.
    if kind == ALL_REDUCE:
        return _ops.all_reduce(x, "sum", axis.name)
    if kind == ALL_GATHER:
        return _ops.all_gather_into_tensor(x, axis.size, axis.name)
    if kind == REDUCE_SCATTER:
        return _ops.reduce_scatter_tensor(x, "sum", axis.size, axis.name)
    counts = [x.shape[0] // axis.size] * axis.size
    return _ops.all_to_all_single(x, counts, counts, axis.name)


RECEIVES_FIRST = {"cpu"}
"""Device types that use `boost.parallel.exchange`, because gloo's collectives send before they receive."""


wait: Callable[[Tensor], Tensor] = _ops.wait_tensor
"""Waits for a started collective and returns its result."""


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """Non-differentiable sum over the axis. One all-reduce of x."""
    return wait(start_plain(ALL_REDUCE, x, axis))


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """Non-differentiable: [n, ...] from every process -> [p * n, ...]. One all-gather."""
    return wait(start_plain(ALL_GATHER, x, axis))


def reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    """Non-differentiable: [p * n, ...] summed over the axis -> this process's rows, [n, ...]. One reduce-scatter."""
    return wait(start_plain(REDUCE_SCATTER, x, axis))


def all_to_all(x: Tensor, axis: Axis) -> Tensor:
    """[p * n, ...], the j-th block of n rows for process j -> [p * n, ...], the j-th block from process j. One all-to-all."""
    return wait(start_plain(ALL_TO_ALL, x, axis))


def start_all_reduce_(x: Tensor, axis: Axis) -> None:
    """Non-differentiable: starts an in-place sum of x over the axis. Call `wait(x)` before using x."""
    _ops.all_reduce_(x, "sum", axis.name)


# Differentiable.


def _backward(comm: Comm, dy: Tensor, axis: Axis) -> Tensor:
    if comm.backward is not None:
        return start_plain(comm.backward, dy, axis)
    if comm.forward != ALL_GATHER:
        return dy
    rows = dy.shape[0] // axis.size  # dy is complete and equal on every process
    return dy.narrow(0, axis.rank * rows, rows)


class _Comm(torch.autograd.Function):
    """forward: the forward collective of `comm`, including the wait; dgrad: its backward collective, including the wait.
    Shapes: see the table."""

    @staticmethod
    def forward(ctx: Node, x: Tensor, comm: Comm, axis: Axis, backward_started: bool = False) -> Tensor:
        ctx.comm, ctx.axis, ctx.backward_started = comm, axis, backward_started
        return x.view_as(x) if comm.forward is None else wait(start_plain(comm.forward, x, axis))

    @staticmethod
    def backward(ctx: Node, dy: Tensor) -> tuple[Tensor, None, None, None]:
        dx = dy if ctx.backward_started else _backward(ctx.comm, dy, ctx.axis)
        return dx if ctx.comm.backward is None else wait(dx), None, None, None


class _Start(torch.autograd.Function):
    """forward: starts the forward collective -> (x, in-flight result); dgrad: waits for the gradient's collective, which
    `_Wait` started.

    x is returned for the autograd graph only: its gradient has the shape of x, while the in-flight result may have another
    shape.
    """

    @staticmethod
    def forward(ctx: Node, x: Tensor, comm: Comm, axis: Axis) -> tuple[Tensor, Tensor]:
        ctx.comm = comm
        started = x.view_as(x) if comm.forward is None else start_plain(comm.forward, x, axis)
        ctx.mark_non_differentiable(started)
        return x.view_as(x), started

    @staticmethod
    def backward(ctx: Node, dx: Tensor, _: Any) -> tuple[Tensor, None, None]:
        return dx if ctx.comm.backward is None else wait(dx), None, None


class _Wait(torch.autograd.Function):
    """forward: waits; dgrad: starts the backward collective for the tensor that `_Start` sent. The result is a view of
    the in-flight tensor."""

    @staticmethod
    def forward(ctx: Node, x: Tensor, started: Tensor, comm: Comm, axis: Axis, backward_started: bool) -> Tensor:
        ctx.comm, ctx.axis, ctx.backward_started = comm, axis, backward_started
        y = started if comm.forward is None else wait(started)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Node, dy: Tensor) -> tuple[Tensor, None, None, None, None]:
        return dy if ctx.backward_started else _backward(ctx.comm, dy, ctx.axis), None, None, None, None


class InFlight(NamedTuple):
    """A differentiable collective in flight."""

    wait: Callable[[], Tensor]
    """Waits for the result and returns it. Call it once."""


def start(comm: Comm, x: Tensor, axis: Axis, backward_started: bool = False, split: bool = True) -> InFlight:
    """Starts a differentiable collective from the table. Both passes wait for it later.

    `backward_started`: the consumer of the result starts the backward collective and passes back the in-flight gradient.
    `split`: whether other work runs before the wait. If not, both passes wait immediately: one autograd node instead of two.
    """
    if not split:
        y = _Comm.apply(x, comm, axis, backward_started)
        return InFlight(lambda: y)
    sent, started = _Start.apply(x, comm, axis)
    return InFlight(lambda: _Wait.apply(sent, started, comm, axis, backward_started))


def run(comm: Comm, x: Tensor, axis: Axis) -> Tensor:
    """Runs a differentiable collective from the table, as one autograd node."""
    return _Comm.apply(x, comm, axis)


def features_to_rows(parts: Sequence[Tensor], axis: Axis) -> Tensor:
    """[n, p w] per part -> [p n, sum of w]: the j-th block of n rows holds process j's features, parts side by side. Copies."""
    rows = parts[0].shape[0]
    shares = [x.reshape(rows, axis.size, -1).transpose(0, 1) for x in parts]
    joined = shares[0] if len(shares) == 1 else torch.cat(shares, dim=-1)
    return joined.reshape(axis.size * rows, -1)


def rows_to_features(x: Tensor, axis: Axis) -> Tensor:
    """[p T, D/p], p feature shards stacked along the rows -> [T, D], side by side. Copies."""
    tokens = x.shape[0] // axis.size
    return x.view(axis.size, tokens, -1).transpose(0, 1).reshape(tokens, -1)


def heads_for_each(x: Tensor, heads: int, processes: int) -> Tensor:
    """[n, heads E] -> [n, max(heads, processes) E]: the heads for each process, side by side. A shared head is repeated
    for every process that needs it.

    Copies only if there are fewer heads than processes.
    """
    if heads >= processes:
        return x
    return x.unflatten(-1, (heads, -1)).repeat_interleave(processes // heads, dim=1).flatten(1)
