"""Fewer GPUs than there are, where the batch divides better over them: 6 of 7 may be faster than all 7."""

import math
from dataclasses import replace

from boost.plan.candidates import Request
from boost.plan.search import AXES, Plan, Search

LEAST = 0.75
"""Fraction of the GPUs that are used at least."""

TRIED = 2
"""Numbers of GPUs that are tried."""


def sizes(request: Request) -> list[int]:
    """Numbers of GPUs to try: those of which the batch has the most divisors, larger ones first. None if the batch divides over all
    GPUs, or the mesh is fixed."""
    gpus, batch = request.gpus, request.base.train.global_batch
    if batch % gpus == 0 or request.fixed & set(AXES):
        return []
    fewer = range(max(math.ceil(LEAST * gpus), 1), gpus)
    return sorted(fewer, key=lambda n: (-math.gcd(batch, n) / n, -n))[:TRIED]


def with_fewer(request: Request, best: Plan | None) -> tuple[Search, Plan] | None:
    """The search and the fastest plan on fewer GPUs, if it is faster than `best` on all of them."""
    found: tuple[Search, Plan] | None = None
    for gpus in sizes(request):
        search = Search(replace(request, gpus=gpus))
        plan = search.fastest()
        if plan is not None and (best is None or plan.time.seconds < best.time.seconds):
            found, best = (search, plan), plan
    return found
