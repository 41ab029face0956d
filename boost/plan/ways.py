"""Alternatives to a poor plan: changes to make if nothing fits, and fewer GPUs if those are as fast."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from boost.config.schema import BF16_WEIGHTS_COST
from boost.format import format_seconds
from boost.plan.candidates import POLICIES, Request, legal, structures
from boost.plan.memory import peak
from boost.plan.search import AXES, Plan, Search, peak_ranks
from boost.plan.step_time import ATTENTION_TIME, GEMMS, OTHER

# If nothing fits.

MOST_GPUS = 1024
"""Largest number of GPUs to suggest."""


def way_out(search: Search) -> str:
    """The first change that makes the model fit, and its cost; '' if there is none."""
    for words, request, price in _changes(search.request):
        if any_fits(request):
            plan = Search(request, known=search).fastest()
            if plan is None:
                continue
            seconds = plan.time.seconds
            costs = [f"{format_seconds(seconds)} per step", *([price] if price else [])]
            if request.gpus != search.request.gpus:
                costs.append(f"{format_seconds(seconds * request.gpus)} of GPU time per step")
            return f"{words}: {', '.join(costs)}"
    return ""


def _changes(request: Request) -> Iterator[tuple[str, Request, str]]:
    """Yields (description, changed request, cost in addition to time), in the order in which a user would try them.

    Smaller micro-batches, sharding and recomputation are part of every search, unless the user fixed them.
    """
    base, train = request.base, request.base.train
    for key in sorted(request.fixed):
        (value,) = request.choices(key, ())
        words = str(value).lower() if isinstance(value, bool) else str(value)
        yield f"without --{key} {words}", replace(request, fixed=request.fixed - {key}), ""
    if train.param_dtype == "float32":
        narrow = base.changed(train={"param_dtype": "bfloat16"})
        price = f"and each update rounds weights and moments to bfloat16 (a small model: {BF16_WEIGHTS_COST})"
        yield "with --train.param_dtype bfloat16", replace(request, base=narrow), price
    tried, gpus = [request.gpus, 2 * request.gpus, 4 * request.gpus], 2 * request.gpus
    while not request.fixed & set(AXES) and gpus <= MOST_GPUS:
        among = f"the first of {', '.join(map(str, tried))}, ... that fits"
        yield f"on {gpus} GPUs ({among})", replace(request, gpus=gpus), ""
        gpus *= 2
    length = train.seq_len // 2
    while length >= 64:
        shorter = base.changed(train={"seq_len": length})
        yield f"with sequences of {length:,} tokens (--seq {length})", replace(request, base=shorter), ""
        length //= 2


def any_fits(request: Request) -> bool:
    """Whether any configuration fits at micro-batch 1, or at the micro-batch that the user fixed.

    Only memory matters here, so for each mesh only 1F1B without overlap is tried: two halves need an even micro-batch, and use
    about as much memory.
    """
    if "parallel.overlap" not in request.fixed:
        base = request.base.changed(parallel={"overlap": "none"})
        request = replace(request, base=base, fixed=request.fixed | {"parallel.overlap"})
    on_gpu = request.hardware.is_gpu
    every = request.choices("train.recompute_every", (1,))[0]
    micro_batch = request.choices("train.micro_batch", (1,))[0]
    for parallel in structures(request):
        if parallel.schedule != "1f1b" and "parallel.schedule" not in request.fixed:
            continue
        for policy in request.choices("train.recompute", POLICIES[::-1]):
            config, usable = request.variant(parallel, micro_batch, policy, every), request.allowed_in(parallel)
            if legal(config) and all(peak(config, rank, on_gpu).total <= usable for rank in peak_ranks(config)):
                return True
    return False


# If fewer GPUs are enough.

NEARLY = 0.02
"""Fewer GPUs count as equally fast if they take at most this fraction longer."""

LARGER_GEMMS = 0.9
"""Lower bound on the computation on fewer GPUs, relative to a plan on all GPUs; below 1, because larger GEMMs may be faster."""

MAX_TRIES = 2
"""Maximum number of GPU counts to search."""

EVEN_SHARE = 0.75
"""Counts over which the batch divides better are tried only if they are at least this fraction of the GPUs."""


def fewer_gpus(search: Search, best: Plan, plans: Sequence[Plan] = ()) -> tuple[Search, Plan] | None:
    """Returns the search on fewer GPUs with the fastest plan, and this plan, if it takes at most NEARLY longer than `best`; None if
    there is none.

    A GPU count is searched only if it can be that fast: the least computation among `best` and `plans`, divided evenly over the
    GPUs, must not take longer.
    """
    request, limit = search.request, (1 + NEARLY) * best.time.seconds
    computing = (GEMMS, ATTENTION_TIME, OTHER)
    work = LARGER_GEMMS * min(
        plan.time.devices * sum(plan.time.parts.get(part, 0.0) for part in computing) for plan in (best, *plans)
    )
    found: tuple[Search, Plan] | None = None
    for gpus in [n for n in _numbers(request) if work / n <= limit][:MAX_TRIES]:
        other = Search(replace(request, gpus=gpus), known=search)
        plan = other.fastest()
        if (
            plan is not None
            and plan.time.seconds <= limit
            and (found is None or plan.time.seconds < found[1].time.seconds)
        ):
            found = other, plan
    return found


def _numbers(request: Request) -> list[int]:
    """GPU counts to try: one site, one half, counts over which the batch divides better, one quarter, ..."""
    gpus, batch, hardware = request.gpus, request.base.train.global_batch, request.hardware
    near = (n for n in range(math.ceil(EVEN_SHARE * gpus), gpus) if math.gcd(batch, n) > math.gcd(batch, gpus))
    even = sorted(near, key=lambda n: (-math.gcd(batch, n) / n, -n))
    listed = [hardware.per_site or gpus, gpus // 2, *even[:1], hardware.per_node, *(gpus >> n for n in range(2, 11))]
    return [n for n in dict.fromkeys(listed) if 0 < n < gpus]


# If the batch does not divide over the GPUs.

MUCH_FASTER = 0.05
"""Other batches are named if they take at least this fraction less time per sequence."""


def other_batches(search: Search, best: Plan) -> Iterator[Plan]:
    """Yields the fastest plans for the nearest batches that divide over the GPUs, if they are much faster per sequence."""
    request, batch = search.request, search.request.base.train.global_batch
    if batch % request.gpus == 0 or request.gpus % batch == 0 or "parallel.dp" in request.fixed:
        return
    for whole in (batch // request.gpus * request.gpus, -(-batch // request.gpus) * request.gpus):
        changed = request.base.changed(train={"global_batch": whole}) if whole else request.base
        plan = Search(replace(request, base=changed), known=search).fastest()
        if plan and plan.time.tokens_per_second * (1 - MUCH_FASTER) > best.time.tokens_per_second:
            yield plan
