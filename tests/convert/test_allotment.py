"""Ranks under one budget: the greedy choice against all choices."""

import itertools

import pytest
import torch

from boost.convert.allotment import Candidate, allot


def gain(candidates: dict[str, Candidate], ranks: dict[str, int]) -> float:
    return sum(float(candidates[name].gains[:rank].sum()) for name, rank in ranks.items())


def size(candidates: dict[str, Candidate], ranks: dict[str, int]) -> int:
    return sum(candidates[name].size * rank for name, rank in ranks.items())


@pytest.mark.parametrize("multiple", [1, 2])
def test_no_other_choice_of_the_same_size_gains_more(multiple: int) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        candidates = {
            name: Candidate(
                torch.rand(6, generator=generator, dtype=torch.double).sort(descending=True).values, per_rank
            )
            for name, per_rank in (("a", 5), ("b", 7), ("c", 12))
        }
        budget = 24 * multiple + int(torch.randint(0, 60, (), generator=generator))
        ranks = allot(candidates, budget, multiple)
        assert all(rank % multiple == 0 and multiple <= rank <= 6 for rank in ranks.values())
        used = size(candidates, ranks)
        assert used <= budget
        others = itertools.product(range(multiple, 7, multiple), repeat=3)
        choices = [dict(zip("abc", each, strict=True)) for each in others]
        best = max(gain(candidates, each) for each in choices if size(candidates, each) <= used)
        # One step at most is lost where the best next one does not fit.
        assert gain(candidates, ranks) >= best - max(float(c.gains[:multiple].sum()) for c in candidates.values())
        left = budget - used
        for name, candidate in candidates.items():
            assert ranks[name] == 6 or multiple * candidate.size > left, "a step that fits is taken"


def test_a_linear_that_matters_more_gets_more() -> None:
    flat = torch.ones(8, dtype=torch.double)
    ranks = allot({"little": Candidate(flat, 10), "much": Candidate(2 * flat, 10)}, 110)
    assert ranks == {"little": 3, "much": 8}
