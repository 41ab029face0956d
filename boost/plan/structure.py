"""What predictions for many configurations share: the fields that change a trace, and the tensors that one process stores.

Tensors follow the runtime's description of a model (`boost.config.storage`) and the layout's placements, without
torch. A test compares them with the modules.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from boost.config import architecture
from boost.config.factors import FactorShape, factor_shape
from boost.config.schema import Config, ModelConfig, ParallelConfig
from boost.config.section import UNTRACED, Section
from boost.config.stages import Stage
from boost.config.storage import SUM_AXES, fused_block, fused_weights, shard_axis, sum_axis
from boost.layouts import Placement, local_shape, placement_of, spec_of

_Section = TypeVar("_Section", bound=Section)
MAX_CACHED = 20_000
"""Limit of every cache that is keyed by sections of the configuration."""


@functools.lru_cache(MAX_CACHED)
def traced(section: _Section) -> _Section:
    """The section with its UNTRACED fields reset to their defaults. Equal results are one object, so that caches find it fast."""
    usual = type(section)()
    untraced = [name for name, info in type(section).model_fields.items() if UNTRACED in info.metadata]
    reset = section.model_copy(update={name: getattr(usual, name) for name in untraced})
    return _sections.setdefault(reset, reset)


_sections: dict[Any, Any] = {}


def traced_config(config: Config) -> Config:
    """Resets UNTRACED fields to their defaults."""
    return config.model_copy(update={"parallel": traced(config.parallel), "train": traced(config.train)})


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


class HeldTensors(NamedTuple):
    """The stored tensors of one process."""

    tensors: tuple[StoredTensor, ...]
    """All of them, in forward order."""
    summed: dict[str, tuple[StoredTensor, ...]]
    """Those whose gradients are summed in buckets over each axis (`sum_axis`), from the last tensor to the first."""
    units: dict[tuple[int | None, str], tuple[StoredTensor, ...]]
    """Those of each FSDP unit that are sharded over each axis; unit None: embedding and head."""


def held_tensors(config: Config, stages: Sequence[Stage]) -> HeldTensors:
    """The stored tensors of a process with these stages."""
    return _held(config.model, _storage(config.parallel), tuple(stages))


def stored_tensors(config: Config, stages: Sequence[Stage]) -> tuple[StoredTensor, ...]:
    """Every stored tensor in these stages of one process, in forward order."""
    return held_tensors(config, stages).tensors


@functools.lru_cache(MAX_CACHED)
def _storage(parallel: ParallelConfig) -> ParallelConfig:
    """Reduced to what decides which tensors there are and over which axes they are sharded and summed, whatever the axes' sizes."""
    sharding = {"shard": "full", "dp": 2, "shard_outer": parallel.shard_outer} if parallel.sharded else {}
    reset = traced(parallel).model_copy(update={"cp": 1, "overlap": "none", **sharding})
    return _sections.setdefault(reset, reset)


@functools.lru_cache(MAX_CACHED)
def _held(model: ModelConfig, parallel: ParallelConfig, stages: tuple[Stage, ...]) -> HeldTensors:
    tensors = tuple(tensor for stage in stages for tensor in _tensors_of(model, parallel, stage))
    summed: dict[str, list[StoredTensor]] = {axis: [] for axis in ("", *SUM_AXES)}
    units: dict[tuple[int | None, str], tuple[StoredTensor, ...]] = {}
    for tensor in tensors:
        over = tensor.over(parallel)
        summed[sum_axis(tensor.placement.partial, over)].append(tensor)
        units[tensor.unit, over] = (*units.get((tensor.unit, over), ()), tensor)
    return HeldTensors(tensors, {axis: tuple(those[::-1]) for axis, those in summed.items()}, units)


@functools.lru_cache(MAX_CACHED)
def _tensors_of(model: ModelConfig, parallel: ParallelConfig, stage: Stage) -> tuple[StoredTensor, ...]:
    stored, tensors = _storing(model, parallel), list[StoredTensor]()
    if stage.has_embedding:
        tensors.append(stored((architecture.embedding(model),)))
    for layer in stage.numbers:
        tensors += (
            tensor._replace(unit=layer) for tensor in _block(model, parallel, architecture.first_alike(model, layer))
        )
    if stage.has_head:
        tensors.append(stored((architecture.final_norm(model),)))
        if not (model.tied and stage.has_embedding):
            tensors.append(stored((architecture.head(model),)))
    return tuple(tensors)


@functools.lru_cache(MAX_CACHED)
def _block(model: ModelConfig, parallel: ParallelConfig, layer: int) -> tuple[StoredTensor, ...]:
    placement = functools.partial(placement_of, model=model, parallel=parallel)
    return tuple(map(_storing(model, parallel), fused_block(model, layer, placement)))


def _storing(
    model: ModelConfig, parallel: ParallelConfig
) -> Callable[[tuple[architecture.Parameter, ...]], StoredTensor]:
    """Turns fused parameters into the tensor that stores them."""
    spec = spec_of(parallel)

    def stored(parameters: tuple[architecture.Parameter, ...]) -> StoredTensor:
        role = parameters[0].role
        placement = spec.placement(role, model, parallel)
        shapes = [local_shape(parameter, placement, parallel.tp) for parameter in parameters]
        rows, others = sum(shape[0] for shape in shapes), shapes[0][1:]
        return StoredTensor(rows, math.prod(others), not others, placement, None, spec.may_have_copy(role))

    return stored


class FactorTensors(NamedTuple):
    """The factors of linears with the same input (`boost.optim.factors.FactorUnit`), and the tensors that store them."""

    pairs: tuple[tuple[FactorShape, FactorShape], ...]
    """(A, B) for each linear."""
    stored: tuple[StoredTensor, ...]

    @property
    def shapes(self) -> tuple[FactorShape, ...]:
        """Shapes of all factors."""
        return tuple(shape for pair in self.pairs for shape in pair)


def factor_tensors(config: Config, stages: Sequence[Stage]) -> list[FactorTensors]:
    """The factors in these stages, by unit."""
    model, parallel = config.model, _storage(config.parallel)
    kinds = (architecture.first_alike(model, layer) for stage in stages for layer in stage.numbers)
    return [unit for layer in kinds for unit in _factors(model, parallel, layer)] if model.low_rank else []


@functools.lru_cache(MAX_CACHED)
def _factors(model: ModelConfig, parallel: ParallelConfig, layer: int) -> tuple[FactorTensors, ...]:
    placement = functools.partial(placement_of, model=model, parallel=parallel)
    units = []
    for group in architecture.groups(model, layer):
        fused = list(fused_weights(model, group, "", placement))
        downs, *ups = (
            [factor_shape(parameter, placement(parameter.role), parallel.tp) for parameter in parameters]
            for parameters in fused
        )
        pairs = tuple((down, up) for down, (up,) in zip(downs, ups, strict=True))
        units.append(FactorTensors(pairs, tuple(map(_storing(model, parallel), fused))))
    return tuple(units)
