"""What one process stores, how rows are sharded over replicas, and the collectives between replicas.

With `parallel.shard`, each replica stores an equal number of consecutive rows of every matrix; if rows do not divide evenly, the
last replicas store fewer. All numbers are for the first replica, which stores the most.
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from boost.config.architecture import (
    Parameter,
    embedding,
    final_norm,
    first_alike,
    groups,
    has_latent_gate,
    head,
    latent_gate_parameters,
)
from boost.config.copies import may_have_copy
from boost.config.layouts import Placement, local_shape, placement_of
from boost.config.schema import Config, ModelConfig, ParallelConfig
from boost.config.stages import Stage, whole
from boost.config.traffic import ITEMSIZE, Collective, bucket_lengths


class StoredTensor(NamedTuple):
    """One stored tensor of one process. Several parameters may be fused along its rows."""

    rows: int
    columns: int
    """1 for a vector."""
    vector: bool
    placement: Placement
    unit: int | None
    """Block (FSDP unit) that it is gathered with; None: the unit of embedding and head of its stage."""
    may_have_copy: bool
    """Whether forward and backward use a working copy of it, if working copies are on (`boost.config.copies`)."""

    @property
    def elements(self) -> int:
        """Number of elements of the gathered tensor."""
        return self.rows * self.columns

    def shard_count(self, parallel: ParallelConfig) -> int:
        """Number of processes that its rows are sharded over; 1 if it is not sharded."""
        if self.vector or not parallel.sharded:
            return 1
        return parallel.dp_cp * (parallel.tp if parallel.shard_outer and self.placement.partial else 1)

    def over_replicas(self, parallel: ParallelConfig) -> bool:
        """Whether it is sharded over TP processes too."""
        return parallel.shard_outer and self.placement.partial and not self.vector and parallel.sharded

    def shard(self, parallel: ParallelConfig) -> int:
        """Number of elements of the first shard, which is the largest."""
        return -(-self.rows // self.shard_count(parallel)) * self.columns


def stored_tensor(
    model: ModelConfig, parallel: ParallelConfig, unit: int | None, *parameters: Parameter
) -> StoredTensor:
    """Returns the stored tensor of these fused parameters on one process; `unit` as in `StoredTensor`."""
    placement = placement_of(parameters[0].role, model, parallel)
    shapes = [local_shape(parameter, placement, parallel.tp) for parameter in parameters]
    rows, columns = sum(shape[0] for shape in shapes), math.prod(shapes[0][1:])
    copied = may_have_copy(parameters[0].role, parallel)
    return StoredTensor(rows, columns, len(shapes[0]) == 1, placement, unit, copied)


def stored_tensors(model: ModelConfig, parallel: ParallelConfig, stage: Stage | None = None) -> Sequence[StoredTensor]:
    """Every stored tensor of one process, in forward order. Cached by the fields that they depend on."""
    of_tp = (getattr(parallel, field) for field in _fields_of_tp(type(parallel)))
    key = model, type(parallel), *of_tp, stage
    if key not in _known:
        if len(_known) > 10_000:
            _known.clear()
        _known[key] = tuple(_stored_tensors(model, parallel, stage or whole(model)))
    return _known[key]


_known: dict[Any, Sequence[StoredTensor]] = {}
_NOT_OF_TP = ("pp", "dp", "cp", "shard", "shard_outer", "schedule", "virtual", "split", "overlap")
"""Fields of [parallel] that do not affect the tensors of a TP rank."""


@functools.cache
def _fields_of_tp(parallel: type[ParallelConfig]) -> tuple[str, ...]:
    return tuple(field for field in parallel.model_fields if field not in _NOT_OF_TP)


def _stored_tensors(model: ModelConfig, parallel: ParallelConfig, stage: Stage) -> Iterator[StoredTensor]:
    stored = functools.partial(stored_tensor, model, parallel)

    if stage.has_embedding:
        yield stored(None, embedding(model))
    known: dict[int, list[StoredTensor]] = {}
    for layer in stage.numbers:
        like = first_alike(model, layer)
        if like not in known:
            known[like] = list(_block_tensors(model, parallel, like))
        for tensor in known[like]:
            yield tensor._replace(unit=layer)
    if stage.has_head:
        yield stored(None, final_norm(model))
        yield stored(None, head(model))


def _block_tensors(model: ModelConfig, parallel: ParallelConfig, layer: int) -> Iterator[StoredTensor]:
    stored = functools.partial(stored_tensor, model, parallel)
    prefix = f"layers.{layer}"
    for _ in ("attn_norm", "mlp_norm"):
        yield stored(layer, Parameter(prefix, (model.dim,), "norm"))
    for group in groups(model, layer):
        if model.low_rank:
            yield stored(layer, *group.parameters(prefix, "A"))
            yield from (stored(layer, b) for b in group.parameters(prefix, "B"))
            if has_latent_gate(model, layer):
                yield from (stored(layer, *fused) for fused in latent_gate_parameters(model, group, prefix).values())
        else:
            weights = group.parameters(prefix, "W")
            for _, alike in itertools.groupby(weights, lambda weight: placement_of(weight.role, model, parallel)):
                yield stored(layer, *alike)


def with_whole_weights(config: Config) -> Config:
    """The configuration with parallel.shard = "none" if replicas divide only the moments (`boost.optim.divided`)."""
    if not config.divides_moments:
        return config
    return config.model_copy(update={"parallel": config.parallel.model_copy(update={"shard": "none"})})


def moments_share(config: Config) -> float:
    """Fraction of the moments that a process holds: replicas that divide moments keep two copies of each in total."""
    return min(1.0, 2 / config.parallel.dp) if config.divides_moments else 1.0


def exchange_collectives(config: Config, stages: Sequence[Stage]) -> list[Collective]:
    """All-gathers of updated weights if replicas divide moments: one per bucket, with parts padded to the longest."""
    dp, dtype = config.parallel.dp, config.train.param_dtype
    stored = [t for stage in stages for t in stored_tensors(config.model, config.parallel, stage)]
    result = []
    for length in bucket_lengths([t.elements * ITEMSIZE[dtype] for t in stored]):
        bucket, stored = stored[:length], stored[length:]
        parts = [sum(((i + 1) * t.rows // dp - i * t.rows // dp) * (t.columns or 1) for t in bucket) for i in range(dp)]
        result.append(Collective("step", "all-gather", (dp * max(parts),), dtype, dp, "weights", axis="dp"))
    return result


def gradient_collectives(config: Config, stages: Sequence[Stage]) -> list[Collective]:
    """Bucketed gradient all-reduces of one optimizer step: partial gradients over TP and DP, complete gradients over DP, and
    partial gradients of sharded weights over TP."""
    parallel, dtype, sent = config.parallel, config.train.param_dtype, config.train.sum_dtype
    stored = [t for stage in stages for t in stored_tensors(config.model, parallel, stage)][::-1]
    held = [t for t in stored if t.vector or not parallel.sharded]
    late = [
        t for t in stored if parallel.sharded and not t.vector and t.placement.partial and not t.over_replicas(parallel)
    ]
    result = []
    for tensors, processes, axis in (
        ([t for t in held if t.placement.partial], parallel.tp * parallel.dp_cp, "replicas"),
        ([t for t in held if not t.placement.partial], parallel.dp_cp, "dp"),
        (late, parallel.tp, "tp"),
    ):
        sizes = [t.shard(parallel) for t in tensors]
        for length in bucket_lengths([size * ITEMSIZE[dtype] for size in sizes]) if processes > 1 else ():
            result.append(
                Collective("step", "all-reduce", (sum(sizes[:length]),), sent, processes, "gradients", axis=axis)
            )
            sizes = sizes[length:]
    return result


def gathers(config: Config, stages: Sequence[Stage]) -> list[Collective]:
    """All-gathers of sharded weights and reduce-scatters of their gradients: one per block, and one for embedding and head.

    - ZeRO-1 gathers and scatters once per step.
    - FSDP gathers a block before its forward and before its backward pass and scatters after the latter, in phases 'forward' and
      'backward' of each micro-batch.
    - FSDP in a pipeline, where passes of several micro-batches alternate, reshards a block gathered for a backward pass only after
      the next forward pass, and scatters once per step. That makes one gather per micro-batch plus one, under any schedule, all in
      phase 'step'. (True for up to three stages per process; with more, torch's schedules reshard more often.)
    """
    parallel, train = config.parallel, config.train
    if not parallel.sharded:
        return []
    micro_batches = train.global_batch // (parallel.dp * train.micro_batch)
    full, piped = parallel.shard == "full", parallel.pp > 1
    result: list[Collective] = []
    for stage in stages:
        for unit, elements, processes, axis in _units(config, stage):
            gather = Collective(
                "step", "all-gather", (elements,), train.compute_dtype, processes, "weights", unit, axis
            )
            scatter = Collective(
                "step", "reduce-scatter", (elements,), train.sum_dtype, processes, "gradients", unit, axis
            )
            between = full and unit is not None  # resharded between forward and backward
            if full and not piped:
                result.append(replace(gather, phase="forward"))
                result += [replace(gather, phase="backward")] * between
                result.append(replace(scatter, phase="backward"))
            else:
                result += [gather] * (micro_batches + 1 if between else 1)
                result.append(scatter)
    return result


def _units(config: Config, stage: Stage) -> Iterator[tuple[int | None, int, int, str]]:
    """Yields (block, gathered elements with padding, processes, axis) for each FSDP unit; block None: embedding and head."""
    parallel = config.parallel
    elements: Counter[tuple[int | None, bool]] = Counter()
    """Elements of one shard by (unit, whether it is sharded over TP too)."""
    for tensor in stored_tensors(config.model, parallel, stage):
        if tensor.shard_count(parallel) > 1:
            elements[tensor.unit, tensor.over_replicas(parallel)] += tensor.shard(parallel)
    for unit in (*stage.numbers, None):
        for over_replicas, axis in ((False, "dp"), (True, "replicas")):
            if of_shard := elements[unit, over_replicas]:
                processes = parallel.dp_cp * (parallel.tp if over_replicas else 1)
                yield unit, processes * of_shard, processes, axis
