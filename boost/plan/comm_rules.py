"""What collectives send: those of `boost.parallel.collectives` on `Sized` tensors. Their results have a size, and no numbers."""

from collections.abc import Sequence

import torch

import boost.parallel.collectives  # noqa: F401  defines torch.ops.boost
from boost.config.traffic import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER
from boost.plan.sized import Shape, Sized, make, rule


def _sent(kind: str, payload: Shape, made: Shape, x: Sized, processes: int) -> Sized:
    x.tape.sends(kind, payload, x.dtype, processes)
    operation = {ALL_GATHER: "all_gather_into_tensor", REDUCE_SCATTER: "reduce_scatter"}.get(kind, "all_reduce")
    return make(x, made, operation)


_ops = torch.ops._c10d_functional


@rule(_ops.all_reduce)
def all_reduce(x: Sized, op: str, group: str) -> Sized:
    """A sum."""
    return _sent(ALL_REDUCE, x.shape, x.shape, x, int(group))


@rule(_ops.all_gather_into_tensor)
def all_gather(x: Sized, processes: int, group: str) -> Sized:
    """[n, ...] -> [p n, ...]."""
    gathered = (x.shape[0] * processes, *x.shape[1:])
    return _sent(ALL_GATHER, gathered, gathered, x, processes)


@rule(_ops.reduce_scatter_tensor)
def reduce_scatter(x: Sized, op: str, processes: int, group: str) -> Sized:
    """[p n, ...] -> [n, ...]."""
    return all_to_all_and_sum(x, processes, group)


@rule(torch.ops.boost.reduce_scatter, torch.ops.boost.reduce_scatter.default)
def all_to_all_and_sum(x: Sized, processes: int, group: str) -> Sized:
    """The same on gloo."""
    return _sent(REDUCE_SCATTER, x.shape, (x.shape[0] // processes, *x.shape[1:]), x, processes)


@rule(_ops.all_to_all_single)
def all_to_all(x: Sized, received: Sequence[int], sent: Sequence[int], group: str) -> Sized:
    """Rows for every process against rows from every process."""
    return _sent(ALL_TO_ALL, x.shape, x.shape, x, len(sent))


@rule(_ops.wait_tensor)
def wait_tensor(x: Sized) -> Sized:
    """In place."""
    return x
