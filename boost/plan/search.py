"""Finds, within seconds, the fastest legal configuration that fits in memory.

Time is cheaper to predict than memory, so the search visits candidates in order of step time and returns the first one that fits.
Candidates that differ only in recomputation form one node. Nodes are ordered by the step time without recomputation (the fastest
policy), first by a lower bound on that time, then by its prediction.
"""

import bisect
import heapq
import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from boost.config import rules
from boost.config.schema import Config, ParallelConfig, TrainConfig
from boost.config.stages import stages
from boost.errors import ConfigError
from boost.plan.candidates import (
    POLICIES,
    Request,
    context_sizes,
    divisors,
    legal,
    micro_batches,
    policies,
    structures,
)
from boost.plan.memory import PeakMemory, peak
from boost.plan.step_time import StepTime
from boost.plan.structure import traced
from boost.plan.timing import Predictor

AXES = ("parallel.tp", "parallel.pp", "parallel.dp", "parallel.cp")
"""Keys of the mesh sizes; their product is the number of processes."""

FEW_BLOCKS = 3
"""With fewer blocks than this per stage, full recomputation may need more memory than saving activations."""

TIE, TIE_SECONDS = 0.01, 1e-3
"""Plans whose times differ by less than this fraction, or by less than this many seconds, count as equally fast, because launches
and hooks, which predictions leave out, take that long."""

Test = Callable[[Config], bool]
_Sections = tuple[ParallelConfig, TrainConfig]
Tick = Callable[[int, int], None]
"""Progress callback: (done, total)."""


def tie_limit(seconds: float) -> float:
    """The longest step time that counts as equal to `seconds`."""
    return max((1 + TIE) * seconds, seconds + TIE_SECONDS)


@dataclass(frozen=True)
class Plan:
    """A configuration with its prediction."""

    config: Config
    time: StepTime
    peak: PeakMemory
    """Peak memory on the pipeline rank that needs the most."""
    pp_rank: int
    """That pipeline rank."""
    usable: int
    """Usable memory of one device, in bytes."""
    margin: float = 0.0
    """Fraction of `usable` that must stay free."""

    @property
    def memory(self) -> int:
        """Peak memory in bytes, the maximum over pipeline ranks."""
        return self.peak.total

    @property
    def shortfall(self) -> int:
        """Bytes by which peak memory exceeds usable memory minus the margin; 0 or less if it fits."""
        return self.memory - int(self.usable * (1 - self.margin))


@dataclass
class _SearchNode:
    """Candidates that differ only in recomputation."""

    bound: float
    """Step time without recomputation, or a lower bound on it."""
    config: Config
    """One legal candidate in this node."""
    exact: bool = False
    """Whether `bound` is the predicted time rather than a lower bound."""
    children: list[tuple[float, list[Config]]] | None = None
    """For each recomputation policy: its candidates from the most to the fewest recomputed blocks, and the step time of the last
    one, the fastest. None until the node is visited."""


@dataclass
class Search:
    """Searches the candidates for a request. Predictions are cached."""

    request: Request
    tick: Tick | None = None
    known: "Search | None" = None
    """Another search on the same hardware, whose predictions are reused."""
    considered: int = 0
    """Number of candidates considered."""

    _nodes: list[_SearchNode] = field(default_factory=list)
    _peaks: dict[_Sections, tuple[PeakMemory, int]] = field(default_factory=dict)
    _fits: dict[_Sections, bool] = field(default_factory=dict)
    _full: dict[ParallelConfig, int] = field(default_factory=dict)
    """Smallest micro-batch at which no candidate fits, by structure."""

    def __post_init__(self) -> None:
        self.predictor: Predictor = self.known.predictor if self.known else Predictor(self.request.hardware)
        listed = list(structures(self.request))
        for done, parallel in enumerate(listed):
            self._list(parallel)
            if self.tick:
                self.tick(done + 1, len(listed))

    @property
    def empty(self) -> bool:
        """Whether no configuration is legal."""
        return not self._nodes

    def why_no_tp(self) -> str:
        """If no TP size is legal, the rule that the smallest one violates; else ''."""
        request = self.request
        if any(node.config.parallel.tp > 1 for node in self._nodes) or "parallel.tp" in request.fixed:
            return ""
        whole = {"pp": 1, "dp": 1, "shard": "none", "shard_outer": False, "schedule": "1f1b", "virtual": 1, "split": ()}
        train = {"micro_batch": 1, "global_batch": 1, "recompute": "none", "recompute_every": 1}
        for parallel in structures(request):
            if parallel.tp > 1:
                config = request.base.model_copy(update={"parallel": parallel})
                try:
                    rules.check(config.changed(parallel=whole, train=train))  # one TP group and one micro-batch
                except ConfigError as error:
                    return str(error)
        return ""

    def fastest(
        self, test: Test = bool, of: Callable[[ParallelConfig], bool] | None = None, limit: float = math.inf
    ) -> Plan | None:
        """Returns the fastest candidate that fits, passes `test`, has a [parallel] that passes `of`, and takes at most `limit`
        seconds; None if there is none."""
        numbers = itertools.count()
        waiting: list[tuple[float, int, _SearchNode | list[Config]]] = [
            (node.bound, next(numbers), node) for node in self._nodes if of is None or of(node.config.parallel)
        ]
        heapq.heapify(waiting)
        while waiting and waiting[0][0] <= limit:
            _, _, first = heapq.heappop(waiting)
            if isinstance(first, list):
                if self.fits(first[-1]):
                    return self.plan(first[-1])
                if len(first) > 1 and self.fits(first[0]):
                    # Memory grows from the first to the last candidate. Bisect for the last that fits, which is usually the first.
                    fitting = 1
                    if self.fits(first[1]):
                        fitting = bisect.bisect_left(first, True, 2, len(first) - 1, key=lambda c: not self.fits(c))
                    config = first[fitting - 1]
                    heapq.heappush(waiting, (self.predictor.predict(config).seconds, next(numbers), [config]))
            elif not first.exact:
                # Replaces the lower bound with the predicted time, and queues the node again.
                without = self.request.variant(first.config.parallel, first.config.train.micro_batch)
                first.bound, first.exact = self.predictor.predict(without).seconds, True
                heapq.heappush(waiting, (first.bound, next(numbers), first))
            else:
                if first.children is None:
                    chains = self._fitting(first.config.parallel, first.config.train.micro_batch)
                    first.children = [(self.predictor.predict(chain[-1]).seconds, chain) for chain in chains]
                for seconds, chain in first.children:
                    if test(chain[-1]):
                        heapq.heappush(waiting, (seconds, next(numbers), chain))
        return None

    def simplest(self, best: Plan) -> Plan:
        """Returns the simplest plan that fits and ties with `best`, the fastest one. Prefers fewer axes, then DP alone, then less
        sharding, then no overlap, then fewer stages per process."""
        limit, worst = tie_limit(best.time.seconds), _complexity(best.config.parallel)
        near = {_complexity(node.config.parallel) for node in self._nodes if node.bound <= limit}
        for level in sorted(level for level in near if level < worst):
            plan = self.fastest(of=lambda parallel, level=level: _complexity(parallel) == level, limit=limit)  # type: ignore[misc]
            if plan is not None:
                return plan
        return best

    def smallest(self, test: Test = bool, of: Callable[[ParallelConfig], bool] | None = None) -> Plan | None:
        """Returns the candidate with the lowest peak memory that passes the test, or None. Predicts one candidate per mesh."""
        thrifty: dict[tuple[object, ...], Config] = {}
        for node in self._nodes:
            parallel = node.config.parallel
            if of is None or of(parallel):
                for config, *_ in self._legal_variants(parallel, node.config.train.micro_batch):
                    if test(config):
                        key = traced(parallel), parallel.pp, parallel.dp, parallel.shard, parallel.shard_outer
                        thrifty[key] = min(thrifty.get(key, config), config, key=_memory_rank)
        configs = list(thrifty.values())
        return self.plan(min(configs, key=lambda config: self.peak_memory(config)[0].total)) if configs else None

    def plan(self, config: Config) -> Plan:
        """Predicts the time and the peak memory for one configuration."""
        held, pp_rank = self.peak_memory(config)
        usable = self.request.hardware.usable_in(config.parallel)
        return Plan(config, self.predictor.predict(config), held, pp_rank, usable, self.request.margin)

    def fits(self, config: Config) -> bool:
        """Whether every pipeline rank fits in memory."""
        key, usable = (config.parallel, config.train), self.request.allowed_in(config.parallel)
        if key not in self._fits:
            peaks = (peak(config, rank, self.predictor.on_gpu, usable) for rank in peak_ranks(config))
            self._fits[key] = all(held.total <= usable for held in peaks)
        return self._fits[key]

    def peak_memory(self, config: Config) -> tuple[PeakMemory, int]:
        """(peak memory, pipeline rank) for the rank that needs the most memory."""
        key = (config.parallel, config.train)
        if key not in self._peaks:
            self._peaks[key] = max_peak(config, self.predictor.on_gpu)
        return self._peaks[key]

    def _list(self, parallel: ParallelConfig) -> None:
        """Adds the nodes for one structure, one per micro-batch size."""
        request = self.request
        choices = list(policies(request, parallel))
        # The number of recomputed blocks does not affect whether a candidate is legal.
        one_each = [next(alike) for _, alike in itertools.groupby(choices, operator.itemgetter(0))]
        for micro_batch in micro_batches(request, parallel.dp):
            if not rules.schedules(parallel, request.base.train.global_batch // (parallel.dp * micro_batch)):
                continue
            variants = (request.variant(parallel, micro_batch, *policy) for policy in one_each)
            if (config := next(filter(legal, variants), None)) is None:
                continue
            self.considered += len(choices)
            without = config if config.train.recompute == "none" else request.variant(parallel, micro_batch)
            self._nodes.append(_SearchNode(self.predictor.lower_bound(without), config))

    def _legal_variants(self, parallel: ParallelConfig, micro_batch: int) -> list[list[Config]]:
        """The legal configurations that differ only in recomputation: for each policy, from the most to the fewest
        recomputed blocks."""
        chains: dict[str, list[Config]] = {}
        for policy, every in policies(self.request, parallel):
            chains.setdefault(policy, []).insert(0, self.request.variant(parallel, micro_batch, policy, every))
        return [chain for chain in chains.values() if legal(chain[0])]

    def _fitting(self, parallel: ParallelConfig, micro_batch: int) -> list[list[Config]]:
        """The legal variants; none if the one with the lowest memory does not fit, here or at a smaller micro-batch."""
        chains = self._legal_variants(parallel, micro_batch)
        if self.request.base.model.layers < FEW_BLOCKS * parallel.stages:
            return chains  # recomputing a block may take more memory than saving its activations
        full = self._full.get(parallel, math.inf) <= micro_batch
        if full or not self.fits(min((chain[0] for chain in chains), key=_memory_rank)):
            self._full[parallel] = min(micro_batch, self._full.get(parallel, micro_batch))
            return []
        return chains


def _memory_rank(config: Config) -> tuple[int, ...]:
    """Sort key: lower means less memory, among configurations with the same model, mesh, layout and sharding."""
    train, schedule = config.train, (config.parallel.schedule != "1f1b", config.parallel.virtual)
    return train.micro_batch, -POLICIES.index(train.recompute), train.recompute_every, *schedule


def _complexity(parallel: ParallelConfig) -> tuple[int, ...]:
    """Sort key: lower means simpler to run and to understand."""
    axes = sum(size > 1 for size in (parallel.tp, parallel.pp, parallel.dp, parallel.cp))
    sharded = ("none", "optimizer", "full").index(parallel.shard) + parallel.shard_outer if parallel.sharded else 0
    return axes, parallel.dp != parallel.world_size, sharded, parallel.overlap != "none", parallel.virtual


def peak_ranks(config: Config) -> list[int]:
    """Returns the pipeline ranks that may have the highest peak memory.

    Among ranks with the same ends and the same number of blocks under each policy, the first has the most micro-batches in flight.
    """
    policies_of, pp = config.train.recompute_by_layer(config.model.layers), config.parallel.pp
    all_stages, ranks = stages(config), dict[tuple[object, ...], int]()
    for rank in range(pp):
        held = all_stages[rank::pp]
        blocks = Counter(policies_of[n] for stage in held for n in stage.numbers)
        ends = [(stage.has_embedding, stage.has_head) for stage in held]
        ranks.setdefault((tuple(sorted(blocks.items())), tuple(ends)), rank)
    return list(ranks.values())


def max_peak(config: Config, on_gpu: bool = False) -> tuple[PeakMemory, int]:
    """(peak memory, pipeline rank) for the rank that needs the most memory."""
    return max(
        ((peak(config, rank, on_gpu), rank) for rank in peak_ranks(config)), key=lambda rank_peak: rank_peak[0].total
    )


def require_legal(search: Search) -> None:
    """Raises a ConfigError if no configuration is legal. The error states the violated rule, or that the fixed mesh sizes do not
    match the number of GPUs."""
    if not search.empty:
        return
    request = search.request
    sizes = {key: getattr(request.base.parallel, key.partition(".")[2]) for key in AXES if key in request.fixed}
    for key, size in sizes.items():
        if request.gpus % size:
            best = min(divisors(request.gpus), key=lambda n: (abs(n - size), n))
            raise ConfigError(f"{key} = {size} must divide --gpus = {request.gpus}; nearest valid value: {best}")
    made = math.prod(sizes.values())
    free = set(AXES) - sizes.keys() - ({"parallel.cp"} if len(context_sizes(request, 1)) == 1 else set())
    if sizes and (request.gpus % made or (not free and made != request.gpus)):
        words, must = ", ".join(f"{key} = {size}" for key, size in sizes.items()), "divide" if free else "equal"
        raise ConfigError(f"{words}: their product, {made}, must {must} --gpus = {request.gpus}; change one of them")
    for parallel in structures(request):
        for micro_batch in (*micro_batches(request, parallel.dp), 1):
            for policy in policies(request, parallel):
                rules.check(request.variant(parallel, micro_batch, *policy))
    raise ConfigError(
        f"no mesh of {request.gpus} GPUs is valid for model.layers = {request.base.model.layers} with these options; remove some"
    )
