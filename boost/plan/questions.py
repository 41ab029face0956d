"""Finds the longest sequence, the largest micro-batch or the largest model that these GPUs can train, with its configuration.

Only memory matters here, so only the configurations with the lowest peak memory are tried for each mesh. The global batch is two
micro-batches per replica and stage, so that gradients of an earlier micro-batch exist.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from boost.config.architecture import parameter_count
from boost.config.schema import Config, ModelConfig, ParallelConfig, RecomputeName
from boost.plan.candidates import POLICIES, Request, Variants, legal, structures
from boost.plan.peak import peak
from boost.plan.search import Plan, Search, Tick, max_peak, peak_ranks
from boost.plan.timing import Predictor

SEQUENCE_STEP = 1024
"""Granularity of sequence lengths, in tokens."""

MAX_AMOUNT = 1 << 14
"""Upper bound of a search for sequence length (in SEQUENCE_STEP) or micro-batch (in sequences)."""

MAX_BLOCKS = 512
"""Upper bound of a search for model depth, in blocks."""


@dataclass(frozen=True)
class Answer:
    """The maximum under one recomputation policy."""

    policy: RecomputeName
    amount: int
    """Tokens per sequence, sequences per micro-batch, or blocks; 0: none fits."""
    plan: Plan | None
    """The configuration that reaches this maximum; None if none fits."""


Grow = Callable[[Config, int], Config]
"""Sets the searched quantity of a configuration to n."""


def longest_sequence(request: Request, tick: Tick | None = None) -> list[Answer]:
    """Longest sequence in tokens at micro-batch 1, for each recomputation policy, in steps of SEQUENCE_STEP."""

    def grow(config: Config, n: int) -> Config:
        return _train(config, seq_len=n * SEQUENCE_STEP, **_least_batch(config.parallel, 1))

    return [replace(each, amount=each.amount * SEQUENCE_STEP) for each in _by_policy(request, grow, tick)]


def largest_batch(request: Request, tick: Tick | None = None) -> list[Answer]:
    """Largest micro-batch in sequences, for each recomputation policy."""

    def grow(config: Config, n: int) -> Config:
        return _train(config, **_least_batch(config.parallel, n))

    return _by_policy(request, grow, tick)


def max_layers(request: Request, tick: Tick | None = None) -> list[Answer]:
    """Largest number of blocks of this shape at micro-batch 1, for each recomputation policy."""

    def grow(config: Config, n: int) -> Config:
        model = config.model.model_copy(update={"layers": n})
        return _train(config.model_copy(update={"model": model}), **_least_batch(config.parallel, 1))

    return _by_policy(request, grow, tick, MAX_BLOCKS)


def largest_model(request: Request, shapes: list[tuple[str, ModelConfig]]) -> tuple[str, ModelConfig] | None:
    """Returns the named shape with the most parameters that fits at micro-batch 1; None if none does."""
    for name, model in sorted(shapes, key=lambda each: -parameter_count(each[1])):
        asked = replace(request, base=request.base.model_copy(update={"model": model}))
        if fits_at_all(asked):
            return name, model
    return None


def fits_at_all(request: Request) -> bool:
    """Whether any configuration fits at micro-batch 1, whatever the global batch."""
    smallest = _smallest_configs(request, POLICIES[::-1])
    return any(_fits(_train(config, **_least_batch(config.parallel, 1)), request) for config in smallest)


def fits(request: Request) -> bool:
    """Whether any configuration fits at micro-batch 1 with the request's global batch."""
    return any(_fits(config, request) for config in _smallest_configs(request, POLICIES[::-1]))


def where_it_fits(search: Search) -> str:
    """For a model that does not fit: the number of GPUs, or the sequence length, at which it does."""
    request = search.request
    ways: list[str] = []
    gpus = request.gpus
    free = not request.fixed & {"parallel.tp", "parallel.pp", "parallel.dp", "parallel.cp"}
    while free and gpus < 1024 and not ways:
        gpus *= 2
        if fits(replace(request, gpus=gpus)):
            ways.append(f"on {gpus} GPUs (the fewest of {request.gpus}, {2 * request.gpus}, {4 * request.gpus}, ...)")
    length = request.base.train.seq_len // 2
    while length >= 64:
        if fits(replace(request, base=_train(request.base, seq_len=length))):
            ways.append(f"with sequences of {length:,} tokens (--seq {length})")
            break
        length //= 2
    return " or ".join(ways)


def _by_policy(request: Request, grow: Grow, tick: Tick | None, most: int = MAX_AMOUNT) -> list[Answer]:
    names = [name for name in POLICIES if request.base.model.low_rank or not name.startswith("low-rank")]
    names = [name for name in names if name in request.choices("train.recompute", names)]
    configs = {name: list(_smallest_configs(request, (name,))) for name in names}
    total, done, answers = sum(map(len, configs.values())), 0, []
    for name in names:
        best, chosen = 0, None
        for config in configs[name]:
            more = _largest(config, grow, request, best, most)
            if more > best:
                best, chosen = more, config
            done += 1
            if tick:
                tick(done, total)
        answers.append(Answer(name, best, _plan(grow(chosen, best), request) if chosen else None))
    return answers


def _smallest_configs(request: Request, names: tuple[RecomputeName, ...]) -> Iterator[Config]:
    """Yields each mesh, layout and sharding with 1F1B and each of these policies in every block.

    Overlap is off: halves need an even micro-batch, and use about as much memory.
    """
    if "parallel.overlap" not in request.fixed:
        parallel = request.base.parallel.model_copy(update={"overlap": "none"})
        request = replace(
            request,
            base=request.base.model_copy(update={"parallel": parallel}),
            fixed=request.fixed | {"parallel.overlap"},
        )
    variants = Variants(request)
    for parallel in structures(request):
        if parallel.schedule == "1f1b" or "parallel.schedule" in request.fixed:
            for name in request.choices("train.recompute", names):
                every = request.choices("train.recompute_every", (1,))[0]
                yield variants.of(parallel, 1, name, every)


def _largest(config: Config, grow: Grow, request: Request, above: int, most: int) -> int:
    """The largest n > `above` that is legal and fits; `above` if there is none."""

    def good(n: int) -> bool:
        asked = grow(config, n)
        return legal(asked) and _fits(asked, request)

    first = next((n for n in range(above + 1, above + 3) if legal(grow(config, n))), above + 1)
    if not good(first):
        return above
    low, high = first, 2 * first
    while high <= most and good(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if good(middle) else (low, middle)
    return low


def _fits(config: Config, request: Request) -> bool:
    usable, on_gpu = request.allowed_bytes, request.hardware.is_gpu
    return legal(config) and all(peak(config, rank, on_gpu).total <= usable for rank in peak_ranks(config))


def _plan(config: Config, request: Request) -> Plan:
    held, pp_rank = max_peak(config, request.hardware.is_gpu)
    hardware = request.hardware
    return Plan(config, Predictor(hardware).predict(config), held, pp_rank, hardware.usable_bytes, request.margin)


def _least_batch(parallel: ParallelConfig, micro_batch: int) -> dict[str, int]:
    return {"micro_batch": micro_batch, "global_batch": 2 * parallel.dp * parallel.pp * micro_batch}


def _train(config: Config, **changes: int) -> Config:
    return config.model_copy(update={"train": config.train.model_copy(update=changes)})
