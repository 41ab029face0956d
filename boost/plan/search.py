"""The fastest configuration that fits, of all legal ones, in seconds. Arithmetic only.

Time is cheaper to predict than memory, so that candidates are gone through in the order of their time and the first one that
fits is the answer. Candidates that differ in recomputation alone are one node of that order: without recomputation is the
fastest of them, and a bound of its time, then its time, stands for all until the node is reached. What a node's thriftiest
policy has no room for, no other policy and no larger micro-batch of the same structure has.
"""

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from boost.config import rules
from boost.config.schema import Config, ParallelConfig
from boost.config.stages import stages
from boost.errors import ConfigError
from boost.plan.candidates import POLICIES, Request, Variants, legal, micro_batches, policies, structures
from boost.plan.categories import OPTIMIZER, STATES, WEIGHTS
from boost.plan.peak import PeakMemory, peak
from boost.plan.timing import Predictor, StepTime
from boost.plan.trace import told

AXES = ("parallel.tp", "parallel.pp", "parallel.dp")
"""Sizes whose product is the number of processes."""

FEW = 3
"""Blocks of a stage from which recomputing them in full holds less than keeping their activations."""

Test = Callable[[Config], bool]
Tick = Callable[[int, int], None]
"""Is told how many of how many are done."""


def anything(config: Config) -> bool:
    """No restriction."""
    return True


@dataclass(frozen=True)
class Plan:
    """A configuration with its prediction."""

    config: Config
    time: StepTime
    peak: PeakMemory
    """Of the pipeline process that holds the most."""
    pp_rank: int
    """That process."""
    usable: int
    """Bytes that a device has for tensors."""

    @property
    def memory(self) -> int:
        """Bytes at the worst moment of the worst process."""
        return self.peak.total

    @property
    def missing(self) -> int:
        """Bytes that are missing; 0 or less if it fits."""
        return self.memory - self.usable


@dataclass
class _SearchNode:
    """Candidates that differ in recomputation alone."""

    bound: float
    """Seconds of a step without recomputation, or less."""
    config: Config
    """One of them that is legal."""
    exact: bool = False
    """Whether `bound` is that time."""
    children: list[tuple[float, Config]] | None = None
    """Those that may fit, once the node was reached; in rising order of time."""


@dataclass
class Search:
    """The candidates of a request, and what was found out about them."""

    request: Request
    tick: Tick | None = None
    considered: int = 0
    """Candidates that the search decides between."""
    timed: int = 0
    """Predictions of time made."""
    weighed: int = 0
    """Predictions of memory made."""
    _nodes: list[_SearchNode] = field(default_factory=list)
    _peaks: dict[Any, tuple[PeakMemory, int]] = field(default_factory=dict)
    _lacking: dict[Any, int] = field(default_factory=dict)
    """Of candidates that do not fit: bytes of weights and optimizer alone, on a process that is too small."""
    _full: dict[Any, int] = field(default_factory=dict)
    """By structure and by mesh: the smallest micro-batch for which even the thriftiest candidate has no room; 0: none has."""

    def __post_init__(self) -> None:
        self.predictor, self._variants = Predictor(self.request.hardware), Variants(self.request)
        self.usable = self.request.hardware.usable_bytes
        self._floors: dict[tuple[Any, ...], int] = {}
        self._cuts: dict[tuple[Any, ...], bool] = {}
        self._thriftiest: dict[tuple[Any, ...], ParallelConfig] = {}
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
        """The rule that forbids the smallest TP among these GPUs, if no TP is legal; else ''."""
        request = self.request
        if any(node.config.parallel.tp > 1 for node in self._nodes) or "parallel.tp" in request.fixed:
            return ""
        for parallel in structures(request):
            if parallel.tp > 1:
                try:
                    rules.check(self._alone(parallel, 1))
                except ConfigError as error:
                    return str(error)
        return ""

    def fastest(self, test: Test = anything, of: Callable[[ParallelConfig], bool] | None = None) -> Plan | None:
        """The fastest candidate that fits and passes `test` (and whose parallel section passes `of`), if there is one."""
        numbers = itertools.count()
        waiting: list[tuple[float, int, _SearchNode | Config]] = [
            (node.bound, next(numbers), node) for node in self._nodes if of is None or of(node.config.parallel)
        ]
        heapq.heapify(waiting)
        while waiting:
            _, _, first = heapq.heappop(waiting)
            if isinstance(first, Config):
                if self.fits(first):
                    return self.plan(first)
            elif not first.exact:
                self._refine(first)
                heapq.heappush(waiting, (first.bound, next(numbers), first))
            else:
                for seconds, config in self._opened(first):
                    if test(config):
                        heapq.heappush(waiting, (seconds, next(numbers), config))
        return None

    def smallest(self, test: Test = anything, of: Callable[[ParallelConfig], bool] | None = None) -> Plan | None:
        """The candidate of the least memory that passes, if any does; of a mesh the thriftiest one is weighed."""
        thrifty: dict[Any, tuple[Any, Config]] = {}
        for node in self._nodes:
            parallel = node.config.parallel
            if of is None or of(parallel):
                for config in self._all_children(node):
                    key = _mesh(parallel)
                    rank = _thrift(config)
                    if test(config) and (key not in thrifty or rank < thrifty[key][0]):
                        thrifty[key] = rank, config
        found = [config for _, config in thrifty.values()]
        return self.plan(min(found, key=lambda config: self.weigh(config)[0].total)) if found else None

    def plan(self, config: Config) -> Plan:
        """Prediction of one configuration."""
        held, pp_rank = self.weigh(config)
        return Plan(config, self.predictor.predict(config), held, pp_rank, self.usable)

    def fits(self, config: Config) -> bool:
        """Whether every process has room."""
        key = self._name(config)
        if key not in self._peaks and key not in self._lacking:
            self.weighed += 1
            held = list[tuple[PeakMemory, int]]()
            for rank in worst_ranks(config):
                held.append((peak(config, rank, self.predictor.fused_norm), rank))
                if held[-1][0].total > self.usable:
                    states = sum(held[-1][0].by_category.get(category, 0) for category in (WEIGHTS, OPTIMIZER))
                    self._lacking[key] = states
                    return False
            self._peaks[key] = max(held, key=lambda each: each[0].total)
        return key not in self._lacking and self._peaks[key][0].total <= self.usable

    def weigh(self, config: Config) -> tuple[PeakMemory, int]:
        """(peak, pipeline process) of the process that holds the most."""
        key = self._name(config)
        if key not in self._peaks:
            self.weighed += 1
            self._peaks[key] = worst_peak(config, self.predictor.fused_norm)
        return self._peaks[key]

    @staticmethod
    def _name(config: Config) -> tuple[str, str]:
        return repr(config.parallel), repr(config.train)

    def _list(self, parallel: ParallelConfig) -> None:
        """Nodes of one structure."""
        for micro_batch in micro_batches(self.request, parallel.dp):
            if not self._cuttable(parallel, micro_batch):
                continue
            known = any(node.config.parallel is parallel for node in self._nodes[-1:])
            if known and self._floor(parallel, micro_batch) > self.usable:
                return  # the smallest micro-batch stays listed, so that it can be said what is missing
            listed = list(policies(self.request, parallel))
            config = next((c for each in listed if legal(c := self._variants.of(parallel, micro_batch, *each))), None)
            if config is None:
                continue
            self.considered += 1 if parallel.schedule == "zero-bubble" else len(listed)
            without = self._variants.of(parallel, micro_batch)
            best = self._thriftiest.get(_mesh(parallel), parallel)
            self._thriftiest[_mesh(parallel)] = min(best, parallel, key=_thrift_of)
            self._nodes.append(_SearchNode(self.predictor.at_least(without), config))

    def _refine(self, node: _SearchNode) -> None:
        """From a bound to the time without recomputation."""
        self.timed += 1
        without = self._variants.of(node.config.parallel, node.config.train.micro_batch)
        node.bound, node.exact = self.predictor.predict(without).seconds, True

    def _all_children(self, node: _SearchNode) -> list[Config]:
        return self._variants_of(node.config.parallel, node.config.train.micro_batch)

    def _variants_of(self, parallel: ParallelConfig, micro_batch: int) -> list[Config]:
        listed = (self._variants.of(parallel, micro_batch, *each) for each in policies(self.request, parallel))
        return [config for config in listed if legal(config)]

    def _opened(self, node: _SearchNode) -> list[tuple[float, Config]]:
        """Children of a node with their times; none if even the thriftiest does not fit."""
        if node.children is None:
            configs = self._all_children(node)
            if self._is_full(node, min(configs, key=_thrift)):
                node.children = []
            else:
                self.timed += len(configs)
                timed = [(self.predictor.predict(config).seconds, config) for config in configs]
                node.children = sorted(timed, key=lambda each: each[0])
        return node.children

    def _is_full(self, node: _SearchNode, thriftiest: Config) -> bool:
        """Whether no child fits: the thriftiest structure of the mesh is asked first, then the node's own."""
        parallel, micro_batch = node.config.parallel, node.config.train.micro_batch
        if self.request.base.model.layers < FEW * parallel.stages:
            return False  # recomputing a block may take more than its activations
        # A structure may allow fewer policies than the thriftiest of its mesh (zero bubble: none).
        of_mesh = min(self._variants_of(self._thriftiest[_mesh(parallel)], micro_batch), key=_thrift, default=None)
        asked = [(_mesh(parallel), of_mesh)] if of_mesh is not None else []
        for place, config in (*asked, (repr(parallel), thriftiest)):
            if micro_batch >= self._full.get(place, micro_batch + 1):
                return True
            if not self.fits(config):
                states = self._lacking.get(self._name(config), 0)
                self._full[place] = 0 if states > self.usable else micro_batch
                return True
        return False

    def _alone(self, parallel: ParallelConfig, micro_batch: int) -> Config:
        """One micro-batch on one TP group, without pipeline and replicas."""
        changes = {
            "pp": 1,
            "dp": 1,
            "shard": "none",
            "shard_outer": False,
            "schedule": "1f1b",
            "virtual": 1,
            "split": (),
        }
        train = {"micro_batch": micro_batch, "global_batch": micro_batch, "recompute": "none", "recompute_every": 1}
        base = self.request.base
        return base.model_copy(
            update={"parallel": parallel.model_copy(update=changes), "train": base.train.model_copy(update=train)}
        )

    def _cuttable(self, parallel: ParallelConfig, micro_batch: int) -> bool:
        """Whether TP may cut this model so: asked once, not for each mesh around it."""
        key = *told(parallel, "parallel"), micro_batch
        if key not in self._cuts:
            self._cuts[key] = legal(self._alone(parallel, micro_batch))
        return self._cuts[key]

    def _floor(self, parallel: ParallelConfig, micro_batch: int) -> int:
        """Bytes that some process needs beside its states: for one block, or for the loss."""
        key = *told(parallel, "parallel"), micro_batch
        if key not in self._floors:
            config, model = self._alone(parallel, micro_batch), self.request.base.model
            ranks = {name: rank for name, rank in model.ranks.items() if not name.startswith("layers.")}
            config = config.model_copy(update={"model": model.model_copy(update={"layers": 1, "ranks": ranks})})
            found = []
            for policy in ("none", "full-block"):
                train = config.train.model_copy(update={"recompute": policy})
                held = peak(
                    config.model_copy(update={"train": train}), fused_norm=self.predictor.fused_norm
                ).by_category
                found.append(sum(size for category, size in held.items() if category not in STATES))
            self._floors[key] = min(found)
        return self._floors[key]


def _mesh(parallel: ParallelConfig) -> tuple[Any, ...]:
    """Structures that differ in the schedule of the pipeline alone."""
    return *told(parallel, "parallel"), parallel.pp, parallel.dp, parallel.shard, parallel.shard_outer


def _thrift(config: Config) -> tuple[Any, ...]:
    """Smaller for less memory, among configurations of one model, mesh, layout and sharding."""
    train = config.train
    return train.micro_batch, -POLICIES.index(train.recompute), train.recompute_every, *_thrift_of(config.parallel)


def _thrift_of(parallel: ParallelConfig) -> tuple[Any, ...]:
    return parallel.schedule != "1f1b", parallel.virtual


def worst_ranks(config: Config) -> list[int]:
    """Pipeline processes of which one holds the most.

    Of those that hold equally many blocks under each policy, the first one has the most micro-batches under way.
    """
    policies_of, pp = config.train.recompute_by_layer(config.model.layers), config.parallel.pp
    every, ranks = stages(config), dict[Any, int]()
    for rank in range(pp):
        held = every[rank::pp]
        blocks = Counter(policies_of[n] for stage in held for n in stage.numbers)
        ends = [(stage.has_embedding, stage.has_head) for stage in held]
        ranks.setdefault((tuple(sorted(blocks.items())), tuple(ends)), rank)
    return list(ranks.values())


def worst_peak(config: Config, fused_norm: bool = False) -> tuple[PeakMemory, int]:
    """(peak, pipeline process) of the process that holds the most."""
    return max(((peak(config, rank, fused_norm), rank) for rank in worst_ranks(config)), key=lambda each: each[0].total)


def require_legal(search: Search) -> None:
    """Raises ConfigError, with the rule that is broken, if there is no legal configuration."""
    if not search.empty:
        return
    request = search.request
    _require_mesh(request)
    variants = Variants(request)
    for parallel in structures(request):
        for micro_batch in (*micro_batches(request, parallel.dp), 1):
            for policy in policies(request, parallel):
                rules.check(variants.of(parallel, micro_batch, *policy))
    raise ConfigError(
        f"no mesh of {request.gpus} processes is legal for model.layers = {request.base.model.layers} and these choices; fix fewer"
    )


def _require_mesh(request: Request) -> None:
    """Raises ConfigError if sizes that are fixed make no mesh of so many processes."""
    sizes = {key: getattr(request.base.parallel, key.partition(".")[2]) for key in AXES if key in request.fixed}
    for key, size in sizes.items():
        if request.gpus % size:
            best = rules.nearest(size, request.gpus, lambda n: request.gpus % n == 0)
            raise ConfigError(f"{key} = {size} must divide --gpus = {request.gpus}; nearest valid value: {best}")
    made = math.prod(sizes.values())
    if sizes and (request.gpus % made or (len(sizes) == len(AXES) and made != request.gpus)):
        words = " x ".join(f"{key} = {size}" for key, size in sizes.items())
        raise ConfigError(f"{words} = {made} processes do not make --gpus = {request.gpus}; leave one of them out")
