"""Shape-tensor rules for the collectives of `boost.parallel.collectives`."""

from collections.abc import Sequence

import torch

import boost.parallel.collectives  # noqa: F401  defines torch.ops.boost
from boost.config.traffic import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER
from boost.plan.shape_tensor import Shape, ShapeTensor, make, rule


def _issue(kind: str, payload: Shape, made: Shape, x: ShapeTensor, group: str) -> ShapeTensor:
    axis, _, processes = group.partition(" ")
    x.tape.record_collective(kind, payload, x.dtype, int(processes), axis)
    operation = {ALL_GATHER: "all_gather_into_tensor", REDUCE_SCATTER: "reduce_scatter"}.get(kind, "all_reduce")
    result = make(x, made, operation)
    x.tape.in_flight(result)
    return result


_ops = torch.ops._c10d_functional


@rule(_ops.all_reduce)
def all_reduce(x: ShapeTensor, op: str, group: str) -> ShapeTensor:
    """[...] -> [...], summed over the group."""
    return _issue(ALL_REDUCE, x.shape, x.shape, x, group)


@rule(torch.ops.boost.all_reduce)
def sum_of_two(x: ShapeTensor, at_once: bool, group: str) -> ShapeTensor:
    """The same for two CPU processes."""
    return _issue(ALL_REDUCE, x.shape, x.shape, x, group)


@rule(_ops.all_gather_into_tensor)
def all_gather(x: ShapeTensor, processes: int, group: str) -> ShapeTensor:
    """[n, ...] -> [p n, ...]."""
    gathered = (x.shape[0] * processes, *x.shape[1:])
    return _issue(ALL_GATHER, gathered, gathered, x, group)


@rule(torch.ops.boost.all_gather)
def gather_on_cpu(x: ShapeTensor, processes: int, at_once: bool, group: str) -> ShapeTensor:
    """The same for CPU processes."""
    return all_gather(x, processes, group)


@rule(_ops.reduce_scatter_tensor)
def reduce_scatter(x: ShapeTensor, op: str, processes: int, group: str) -> ShapeTensor:
    """[p n, ...] -> [n, ...]."""
    return _issue(REDUCE_SCATTER, x.shape, (x.shape[0] // processes, *x.shape[1:]), x, group)


@rule(torch.ops.boost.reduce_scatter)
def scatter_on_cpu(x: ShapeTensor, processes: int, at_once: bool, group: str) -> ShapeTensor:
    """The same for CPU processes."""
    return reduce_scatter(x, "sum", processes, group)


@rule(_ops.all_to_all_single)
def all_to_all(x: ShapeTensor, received: Sequence[int], sent: Sequence[int], group: str) -> ShapeTensor:
    """[...] -> [...]; sends rows to every process and receives rows from every process."""
    return _issue(ALL_TO_ALL, x.shape, x.shape, x, group)


@rule(torch.ops.boost.all_to_all)
def exchange_on_cpu(x: ShapeTensor, processes: int, at_once: bool, group: str) -> ShapeTensor:
    """The same for CPU processes."""
    return _issue(ALL_TO_ALL, x.shape, x.shape, x, group)


@rule(_ops.wait_tensor)
def wait_tensor(x: ShapeTensor) -> ShapeTensor:
    """Returns its input, which is then no longer in flight."""
    x.tape.wait(x)
    return x
