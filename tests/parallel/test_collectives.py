"""The CPU reduce-scatter counts as one reduce-scatter and rounds once. measure/verify/test_collectives.py compares every function
with plain arithmetic, waited for immediately and later."""

import torch

from boost.measure.counting import CollectiveCounter
from boost.parallel.collectives import reduce_scatter
from tests import toy
from tests.distributed import run_distributed


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
