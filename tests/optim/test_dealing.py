"""Each problem is solved by one process, and one collective sends every solution to all, bitwise equal."""

import pytest
import torch
from torch import Tensor

from boost.config.factors import deal
from boost.config.traffic import Collective
from boost.optim.factors import solve_all
from boost.parallel.counting import CollectiveCounter
from boost.parallel.mesh import Axis
from tests import toy
from tests.distributed import run_distributed

pytestmark = pytest.mark.slow

SIZES = [6, 1, 20, 6, 2]


def solution(number: int) -> Tensor:
    return torch.randn(SIZES[number], generator=torch.Generator().manual_seed(number), dtype=torch.double).view(1, -1)


def solve_some(axis: Axis, count: int) -> tuple[list[int], list[Tensor], list[Collective]]:
    """The problems that this process solved, all solutions, and the collectives issued."""
    solved: list[int] = []

    def solve(number: int) -> Tensor:
        solved.append(number)
        return solution(number)

    sizes = SIZES[:count]
    with CollectiveCounter() as counter:
        found = solve_all(deal([size**2 for size in sizes], sizes, axis.size), solve, torch.zeros(0).double(), axis)
    return solved, found, counter.collectives


def on_replicas(tp: int, dp: int, count: int) -> tuple[list[int], list[Tensor], list[Collective]]:
    return solve_some(toy.mesh(tp=tp, dp=dp).replicas, count)


@pytest.mark.parametrize(("tp", "dp"), [(2, 1), (1, 3), (2, 2)], ids=str)
@pytest.mark.parametrize("count", [5, 2, 1])
def test_every_problem_is_solved_once_for_all(tp: int, dp: int, count: int) -> None:
    """Includes fewer problems than processes."""
    results = run_distributed(tp * dp, on_replicas, tp, dp, count)
    assert sorted(number for solved, *_ in results for number in solved) == list(range(count))
    expected = deal([size**2 for size in SIZES[:count]], SIZES[:count], tp * dp)
    for _, found, (sent,) in results:
        assert all(torch.equal(x, solution(number).flatten()) for number, x in enumerate(found))
        assert (sent.kind, sent.elements, sent.processes) == (expected.kind, expected.elements, tp * dp)


def test_one_process_sends_nothing() -> None:
    solved, found, sent = solve_some(Axis(), 5)
    assert (solved, sent) == ([0, 1, 2, 3, 4], [])
    assert all(torch.equal(x, solution(number).flatten()) for number, x in enumerate(found))
