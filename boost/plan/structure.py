"""What predictions for many configurations share: the fields that change a trace, and the tensors that one process stores.

Tensors follow the runtime's description of a model (`boost.config.storage`) and the layout's placements, without
torch. A test compares them with the modules.
"""

import functools
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

from boost.config import architecture
from boost.config.factors import FactorShape, factor_shape, rate_scale
from boost.config.layouts import Placement, local_shape, placement_of, spec_of
from boost.config.schema import Config, ModelConfig, ParallelConfig
from boost.config.section import UNTRACED, Section
from boost.config.stages import Stage
from boost.config.storage import SUM_AXES, fused_block, fused_weights, shard_axis, sum_axis

_Section = TypeVar("_Section", bound=Section)
MAX_CACHED = 20_000
"""Limit of every cache that is keyed by sections of the configuration."""


def altered(section: _Section, **values: object) -> _Section:
    """A copy with other values of fields, none of which selects the class. A search makes tens of thousands, and pydantic's
    `model_copy` takes three times as long."""
    made = object.__new__(type(section))
    object.__setattr__(made, "__dict__", section.__dict__ | values)
    object.__setattr__(made, "__pydantic_fields_set__", section.__pydantic_fields_set__ | values.keys())
    object.__setattr__(made, "__pydantic_extra__", None)
    object.__setattr__(made, "__pydantic_private__", None)
    return made


@functools.lru_cache(MAX_CACHED)
def without(parallel: ParallelConfig, name: str) -> ParallelConfig:
    """The section with "none" for overlap or shard."""
    return altered(parallel, **{name: "none"})


@functools.lru_cache(MAX_CACHED)
def traced(section: _Section) -> _Section:
    """The section with its UNTRACED fields reset to their defaults. Equal results are one object, so that caches find it fast."""
    return _interned(altered(section, **_usual(type(section))))


@functools.cache
def _usual(kind: type[Section]) -> dict[str, object]:
    """The defaults of UNTRACED fields."""
    usual = kind()
    return {name: getattr(usual, name) for name, info in kind.model_fields.items() if UNTRACED in info.metadata}


@functools.lru_cache(MAX_CACHED)
def _interned(section: _Section) -> _Section:
    return section


class StoredTensor(NamedTuple):
    """One stored tensor on one process. Several parameters may be fused along its rows."""

    rows: int
    columns: int
    """1 for a vector."""
    vector: bool
    placement: Placement
    unit: int | None
    """Block (FSDP unit) that it is gathered with; None: the unit of its stage's embedding and head."""
    may_have_copy: bool
    """Whether passes use a working copy of it if working copies are on (`LayoutSpec.may_have_copy`)."""
    is_index: bool = False
    """Whether it is int64 and not trained."""

    @property
    def elements(self) -> int:
        """Number of elements in the gathered tensor."""
        return self.rows * self.columns

    def over(self, parallel: ParallelConfig) -> str:
        """The axis over which replicas shard its rows, dp or replicas; empty: it is not sharded."""
        return shard_axis(self.placement.partial, self.vector, parallel)

    def shard_count(self, parallel: ParallelConfig) -> int:
        """Number of processes that its rows are sharded over; 1 if it is not sharded."""
        return processes_on(self.over(parallel), parallel)

    def shard(self, parallel: ParallelConfig) -> int:
        """Number of elements in the first shard, which is the largest."""
        return -(-self.rows // self.shard_count(parallel)) * self.columns


def processes_on(axis: str, parallel: ParallelConfig) -> int:
    """Number of processes on an axis across replicas (as in `Collective.axis`); 1 for no axis."""
    return {"": 1, "tp": parallel.tp, "dp": parallel.dp_cp, "replicas": parallel.dp_cp * parallel.tp}[axis]


class FactorTensors(NamedTuple):
    """The factors of linears with the same input (`boost.optim.factors.FactorUnit`), and the tensors that store them."""

    inner: tuple[FactorShape, ...]
    outer: tuple[FactorShape, ...]
    stored: tuple[StoredTensor, ...]
    scales: tuple[float, ...]
    """Multiplier of the learning rate of each inner map (`rate_scale`)."""

    @property
    def shapes(self) -> tuple[FactorShape, ...]:
        """Shapes of all factors."""
        return (*self.inner, *self.outer)

    @property
    def pairs(self) -> Iterator[tuple[FactorShape, FactorShape]]:
        """(A, B) for each linear of a product B A."""
        return zip(self.inner, self.outer, strict=True)


class HeldTensors:
    """The stored tensors of one process, whatever the sizes of the axes over which they are sharded and summed."""

    def __init__(self, model: ModelConfig, parallel: ParallelConfig, stages: tuple[Stage, ...]) -> None:
        self.model, self.parallel, self.stages = model, parallel, stages
        held = {stage.index: _tensors_of(model, parallel, stage) for stage in stages}
        self.by_stage = {n: tuple(tensor for tensor in tensors if not tensor.is_index) for n, tensors in held.items()}
        """The trained tensors of each stage, by its index, in forward order."""
        self.indices = sum(tensor.elements for tensors in held.values() for tensor in tensors if tensor.is_index)
        """Elements of indices, int64."""
        self.tensors = tuple(tensor for tensors in self.by_stage.values() for tensor in tensors)
        summed: dict[str, list[StoredTensor]] = defaultdict(list)
        self.units: dict[tuple[int, int | None, str], list[StoredTensor]] = defaultdict(list)
        """Those of each FSDP unit that are sharded over each axis, by stage, block (None: embedding and head) and axis."""
        for stage, tensors in self.by_stage.items():
            for tensor in tensors:
                over = tensor.over(parallel)
                summed[sum_axis(tensor.placement.partial, over)].append(tensor)
                self.units[stage, tensor.unit, over].append(tensor)
        self.summed = {axis: tuple(summed[axis][::-1]) for axis in SUM_AXES}
        """Those whose gradients are summed in buckets over each axis (`sum_axis`), from the last tensor to the first."""

    @functools.cached_property
    def counts(self) -> Counter[StoredTensor]:
        """How often each tensor occurs in any block; blocks come first."""
        ordered = (sorted(tensors, key=lambda tensor: tensor.unit is None) for tensors in self.by_stage.values())
        return Counter(tensor._replace(unit=None) for tensors in ordered for tensor in tensors)

    @functools.cached_property
    def kind(self) -> tuple[object, ...]:
        """Equal for processes that store equal tensors of one model under one layout."""
        alike = (Counter(architecture.first_alike(self.model, n) for n in stage.numbers) for stage in self.stages)
        return tuple((*each.items(), s.has_embedding, s.has_head) for each, s in zip(alike, self.stages, strict=True))

    def shards(self, parallel: ParallelConfig) -> int:
        """Number of elements in the first shards of all tensors."""
        return sum(count * tensor.shard(parallel) for tensor, count in self.counts.items())

    @functools.cached_property
    def factors(self) -> list[FactorTensors]:
        """The factors, by unit."""
        kinds = (architecture.first_alike(self.model, layer) for stage in self.stages for layer in stage.numbers)
        return [unit for n in kinds for unit in _factors(self.model, self.parallel, n)] if self.model.low_rank else []


def held_tensors(config: Config, stages: Sequence[Stage]) -> HeldTensors:
    """The stored tensors of a process with these stages."""
    # Reduced to what decides which tensors there are and over which axes they are sharded and summed, whatever the axes' sizes.
    parallel = config.parallel
    sharding = {"shard": "full", "dp": 2, "shard_outer": parallel.shard_outer} if parallel.sharded else {}
    parallel = _interned(altered(traced(parallel), cp=1, overlap="none", **sharding))
    return _held(config.model, parallel, tuple(stages))


_held = functools.lru_cache(MAX_CACHED)(HeldTensors)


@functools.lru_cache(MAX_CACHED)
def _tensors_of(model: ModelConfig, parallel: ParallelConfig, stage: Stage) -> tuple[StoredTensor, ...]:
    tensors = [_stored(model, parallel, (architecture.embedding(model),))] if stage.has_embedding else []
    for layer in stage.numbers:
        tensors += _block(model, parallel, layer)
    if stage.has_head:
        tensors.append(_stored(model, parallel, (architecture.final_norm(model),)))
        if not (model.tied and stage.has_embedding):
            tensors.append(_stored(model, parallel, (architecture.head(model),)))
    return tuple(tensors)


@functools.lru_cache(MAX_CACHED)
def _block(model: ModelConfig, parallel: ParallelConfig, layer: int) -> tuple[StoredTensor, ...]:
    if (alike := architecture.first_alike(model, layer)) != layer:
        return tuple(tensor._replace(unit=layer) for tensor in _block(model, parallel, alike))
    placement = functools.partial(placement_of, model=model, parallel=parallel)
    return tuple(_stored(model, parallel, each)._replace(unit=layer) for each in fused_block(model, layer, placement))


@functools.lru_cache(MAX_CACHED)
def _factors(model: ModelConfig, parallel: ParallelConfig, layer: int) -> tuple[FactorTensors, ...]:
    placement = functools.partial(placement_of, model=model, parallel=parallel)
    units = []
    for group in architecture.groups(model, layer):
        fused = [each for each in fused_weights(model, group, "", placement) if not each[0].is_index]
        inner, *outer = (
            tuple(factor_shape(parameter, placement(parameter.role), parallel.tp) for parameter in parameters)
            for parameters in fused
        )
        stored = tuple(_stored(model, parallel, parameters) for parameters in fused)
        scales = tuple(rate_scale(a, model.dim) for a in fused[0])
        units.append(FactorTensors(inner, tuple(itertools.chain(*outer)), stored, scales))
    return tuple(units)


def _stored(
    model: ModelConfig, parallel: ParallelConfig, parameters: tuple[architecture.Parameter, ...]
) -> StoredTensor:
    """The tensor that stores fused parameters."""
    role, spec = parameters[0].role, spec_of(parallel)
    placement = spec.placement(role, model, parallel)
    shapes = [local_shape(parameter, placement, parallel.tp) for parameter in parameters]
    rows, others = sum(shape[0] for shape in shapes), shapes[0][1:]
    may_have_copy, is_index = spec.may_have_copy(role), parameters[0].is_index
    return StoredTensor(rows, math.prod(others), not others, placement, None, may_have_copy, is_index)
