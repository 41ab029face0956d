"""The CPU reduce-scatter counts as one reduce-scatter and rounds once. A collective that is started and waited for later gives
bitwise the same result as one that is waited for immediately, in both passes."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from boost.config.traffic import Collective
from boost.layouts import spec
from boost.layouts.spec import Comm
from boost.measure.counting import CollectiveCounter
from boost.parallel import collectives
from boost.parallel.collectives import reduce_scatter
from boost.parallel.mesh import Axis
from tests import toy
from tests.distributed import run_distributed

COMMS = {name: value for name, value in vars(spec).items() if isinstance(value, Comm)}


def scatter(size: int) -> tuple[bool, bool, list[tuple[str, tuple[int, ...], int]]]:
    axis = toy.mesh(tp=size).tp
    terms = torch.randn(size, 4 * size, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    own = slice(4 * axis.rank, 4 * axis.rank + 4)
    with CollectiveCounter() as counter:
        exact = reduce_scatter(terms[axis.rank].t().contiguous().t(), axis)  # non-contiguous input
    rounded = terms.bfloat16()
    once = reduce_scatter(rounded[axis.rank], axis)
    return (
        torch.allclose(exact, terms.sum(0)[own], rtol=1e-14, atol=1e-14),
        torch.equal(once, rounded.float().sum(0).bfloat16()[own]),
        [(c.kind, c.shape, c.sent_bytes) for c in counter.collectives],
    )


def test_rows_are_summed_where_they_belong() -> None:
    for size in (2, 4):
        sent = 4 * size * 3 * 8 * (size - 1) // size
        expected = (True, True, [("reduce-scatter", (4 * size, 3), sent)])
        assert run_distributed(size, scatter, size) == [expected] * size


Seen = tuple[list[Tensor], list[Collective]]
"""Results, gradients, and the collectives issued for them."""


def seen(function: Callable[..., tuple[Tensor, ...]], axis: Axis) -> Seen:
    """Runs `function` forward and backward on this process's two tensors. Each element of the result has a different weight."""
    generator = torch.Generator().manual_seed(axis.rank)
    inputs = [torch.randn(4, 3, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(2)]
    with CollectiveCounter() as counter:
        results = function(*inputs)
        counter.phase = "backward"
        loss = sum((y.sin() * torch.linspace(1 + axis.rank, 2, y.numel()).view_as(y)).sum() for y in results)
        gradients = torch.autograd.grad(loss, inputs)
    return [*(y.detach() for y in results), *gradients], counter.collectives


def same(one: Seen, other: Seen) -> bool:
    """Bitwise equal, with the same collectives in the same order."""
    pairs = zip(one[0], other[0], strict=True)
    return all(torch.equal(a, b) for a, b in pairs) and one[1] == other[1] and bool(one[1])


def separately(names: tuple[str, str]) -> dict[str, bool]:
    """Whether two collectives give the same results run immediately and split, with other work in between."""
    axis = toy.mesh(tp=2).tp
    first, second = (COMMS[name] for name in names)

    def at_once(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        y = collectives.run(first, a * 3, axis)
        return y, collectives.run(second, b * 5, axis), a.cos() @ b.T

    def one_after_the_other(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        started = collectives.start(first, a * 3, axis)
        between = a.cos()
        y = started.wait()
        started = collectives.start(second, b * 5, axis)
        between = between @ b.T
        return y, started.wait(), between

    def interleaved(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        started = collectives.start(first, a * 3, axis), collectives.start(second, b * 5, axis)
        between = a.cos() @ b.T
        y = started[0].wait()
        return y, started[1].wait(), between

    expected = seen(at_once, axis)
    return {each.__name__: same(seen(each, axis), expected) for each in (one_after_the_other, interleaved)}


@pytest.mark.parametrize("names", list(itertools.product(COMMS, repeat=2)), ids="-".join)
def test_split_collectives_match_immediate_ones(names: tuple[str, str]) -> None:
    for same in run_distributed(2, separately, names):
        assert same == {"one_after_the_other": True, "interleaved": True}
