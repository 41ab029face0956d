"""Tries fewer GPUs than are available, if the batch divides better over them: 6 of 7 GPUs may be faster than all 7."""

import math
from dataclasses import replace

from boost.plan.candidates import Request
from boost.plan.search import AXES, Plan, Search

MIN_FRACTION = 0.75
"""Minimum fraction of the GPUs to use."""

MAX_TRIES = 2
"""How many GPU counts to try."""


def sizes(request: Request) -> list[int]:
    """GPU counts to try: those that share the largest factor with the global batch, larger counts first. Empty if the batch divides
    evenly over all GPUs, or if the mesh is fixed."""
    gpus, batch = request.gpus, request.base.train.global_batch
    if batch % gpus == 0 or request.fixed & set(AXES):
        return []
    fewer = range(max(math.ceil(MIN_FRACTION * gpus), 1), gpus)
    return sorted(fewer, key=lambda n: (-math.gcd(batch, n) / n, -n))[:MAX_TRIES]


def with_fewer(request: Request, best: Plan | None) -> tuple[Search, Plan] | None:
    """Returns the search and the fastest plan on fewer GPUs if it beats `best`, the plan on all of them; else None."""
    found: tuple[Search, Plan] | None = None
    for gpus in sizes(request):
        search = Search(replace(request, gpus=gpus))
        plan = search.fastest()
        if plan is not None and (best is None or plan.time.seconds < best.time.seconds):
            found, best = (search, plan), plan
    return found
