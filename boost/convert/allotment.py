"""Ranks of all linears under one budget of parameters."""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Candidate:
    """One linear: what each direction is worth, and what a rank costs."""

    gains: Tensor
    """[min(O, I)] fp64, descending: fall of the loss from each further rank."""
    size: int
    """Parameters per rank: O + I."""


def allot(candidates: Mapping[str, Candidate], budget: int, multiple: int = 1) -> dict[str, int]:
    """Ranks, multiples of `multiple` (or all of a linear narrower than it), that gain the most with at most `budget` parameters.

    Greedy by gain per parameter, which is optimal up to the last step because gains descend. Each linear gets at least one
    step. If the best next step does not fit, cheaper ones may.
    """
    ranks: dict[str, int] = {}
    queue: list[tuple[float, str, int]] = []
    left = budget

    def push(name: str) -> None:
        gains, rank = candidates[name].gains, ranks[name]
        step = min(multiple, len(gains) // multiple * multiple - rank)
        if step > 0:
            heapq.heappush(
                queue, (-float(gains[rank : rank + step].sum()) / (step * candidates[name].size), name, step)
            )

    for name, candidate in candidates.items():
        ranks[name] = min(multiple, len(candidate.gains))
        left -= ranks[name] * candidate.size
        push(name)
    while queue:
        _, name, step = heapq.heappop(queue)
        if step * candidates[name].size > left:
            continue
        ranks[name] += step
        left -= step * candidates[name].size
        push(name)
    return ranks
