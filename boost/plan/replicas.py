"""Stored tensors on one process, and what sharding their rows over replicas costs: collectives between replicas, and memory.

With `parallel.shard`, each replica stores an equal number of consecutive rows of every matrix; if rows do not divide evenly, the
last replicas store fewer. All numbers are for the first replica, which stores the most.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from boost.config.schema import Config, ParallelConfig
from boost.config.stages import Stage
from boost.config.storage import SUM_AXES
from boost.config.traffic import ITEMSIZE, Collective, bucket_lengths
from boost.plan.categories import GATHERED, WORK
from boost.plan.structure import MAX_CACHED, HeldTensors, StoredTensor, processes_on


def with_whole_weights(config: Config) -> Config:
    """The configuration with parallel.shard = "none" if replicas divide only the moments (in-step recovery)."""
    return config.changed(parallel={"shard": "none"}) if config.divides_moments else config


def exchange_collectives(config: Config, held: HeldTensors) -> list[Collective]:
    """All-gathers of updated weights if replicas divide moments: one per bucket, with parts padded to the longest."""
    dp, dtype = config.parallel.dp, config.train.param_dtype
    stored, result = held.tensors, []
    for length in bucket_lengths([t.elements * ITEMSIZE[dtype] for t in stored]):
        bucket, stored = stored[:length], stored[length:]
        parts = [sum(((i + 1) * t.rows // dp - i * t.rows // dp) * (t.columns or 1) for t in bucket) for i in range(dp)]
        result.append(Collective("step", "all-gather", (dp * max(parts),), dtype, dp, "weights", axis="dp"))
    return result


class SumBucket(NamedTuple):
    """Gradients that are summed together, once per step."""

    axis: str
    elements: int
    """Elements on this process."""
    length: int
    """Number of tensors."""
    filled_by: int | None
    """The block whose backward pass fills it; None: the end of the backward pass."""


def sum_buckets(config: Config, held: HeldTensors) -> Iterator[SumBucket]:
    """The buckets of gradients on a process, in order of launch for each axis."""
    parallel, itemsize = config.parallel, ITEMSIZE[config.train.param_dtype]
    for axis in SUM_AXES:
        if processes_on(axis, parallel) > 1:
            # Only gradients that are summed over TP alone are sharded over replicas.
            shards = parallel.dp_cp if axis == "tp" else 1
            yield from _buckets_of(axis, held.summed[axis], shards, itemsize)


@functools.lru_cache(MAX_CACHED)
def _buckets_of(axis: str, tensors: tuple[StoredTensor, ...], shards: int, itemsize: int) -> list[SumBucket]:
    sizes, start, buckets = [-(-t.rows // shards) * t.columns for t in tensors], 0, list[SumBucket]()
    for length in bucket_lengths([size * itemsize for size in sizes]):
        last = tensors[start + length - 1].unit if start + length < len(tensors) else None
        buckets.append(SumBucket(axis, sum(sizes[start : start + length]), length, last))
        start += length
    return buckets


def gradient_collectives(config: Config, held: HeldTensors) -> list[Collective]:
    """Bucketed gradient all-reduces in one optimizer step."""
    parallel, dtype, sent = config.parallel, config.train.param_dtype, config.train.sum_dtype
    stages, stored, result = held.stages, held.tensors, list[Collective]()
    for axis, elements, *_ in sum_buckets(config, held):
        processes = processes_on(axis, parallel)
        result.append(Collective("step", "all-reduce", (elements,), sent, processes, "gradients", axis=axis))
    if config.model.tied and parallel.pp > 1 and any(stage.has_embedding or stage.has_head for stage in stages):
        table = stored[0] if stages[0].has_embedding else stored[-1]
        shape = table.shard(parallel) // table.columns, table.columns
        result.append(Collective("step", "send", shape, dtype, 2, "tied table", axis="pp"))
    return result


def gathers(config: Config, held: HeldTensors) -> Iterator[tuple[Collective, int]]:
    """Yields all-gathers of sharded weights and reduce-scatters of their gradients, and how often each is repeated: one per block,
    and one for embedding and head.

    - ZeRO-1 gathers and scatters once per step.
    - FSDP gathers a block before its forward pass and its backward pass, and scatters its gradients after the latter, in phases
      'forward' and 'backward' of each micro-batch.
    - FSDP in a pipeline, where passes for several micro-batches alternate, reshards a block gathered for a backward pass only after
      the next forward pass, and scatters once per step. That makes one gather per micro-batch plus one, under any schedule, all in
      phase 'step'. (This is true for up to three stages per process; with more, torch's schedules reshard more often.)
    """
    parallel, train = config.parallel, config.train
    if not parallel.sharded:
        return
    micro_batches = train.global_batch // (parallel.dp * train.micro_batch)
    full, piped = parallel.shard == "full", parallel.pp > 1
    units = [(stage.index, unit) for stage in held.stages for unit in (*stage.numbers, None)]
    for (stage, unit), axis in itertools.product(units, ("dp", "replicas")):
        tensors, processes = held.units.get((stage, unit, axis)), processes_on(axis, parallel)
        if not tensors or processes == 1:
            continue
        padded = (processes * sum(-(-t.rows // processes) * t.columns for t in tensors),)
        gather = Collective("step", "all-gather", padded, train.compute_dtype, processes, "weights", unit, axis)
        scatter = Collective("step", "reduce-scatter", padded, train.sum_dtype, processes, "gradients", unit, axis)
        between = full and unit is not None  # resharded between forward and backward
        if full and not piped:
            yield gather._replace(phase="forward"), 1
            if between:
                yield gather._replace(phase="backward"), 1
            yield scatter._replace(phase="backward"), 1
        else:
            yield gather, micro_batches + 1 if between else 1
            yield scatter, 1


END = "end"
"""Key for the embedding at the end of a backward pass."""


class Shards:
    """Memory that ZeRO and FSDP need in addition to shards: gathered weights, and gradients before they are reduced.

    The runtime is torch's fully_shard (`boost.parallel.weights`). A unit is a block, or the embedding and head in a stage. Weights
    are gathered into one flat tensor, which lives until the next unit is gathered, and are then copied out of it. Gradients are
    copied into one flat tensor for the reduce-scatter.
    """

    def __init__(self, parallel: ParallelConfig, held: HeldTensors, compute: int, stored: int) -> None:
        """`compute`, `stored`: bytes per element of gathered weights, and of stored weights and their gradients."""
        self.enabled = parallel.sharded
        self.compute, self.stored = compute, stored
        self.units: dict[tuple[int, int | str | None], int] = {}
        """Elements in each unit, by (stage, block or None)."""
        self.shards: Counter[tuple[int, int | str | None]] = Counter()
        """Elements in the shard of each unit."""
        self.vectors: Counter[int] = Counter()
        for stage, tensors in held.by_stage.items() if self.enabled else ():
            for tensor in tensors:
                if tensor.shard_count(parallel) > 1:
                    key = stage, tensor.unit
                    self.units[key] = self.units.get(key, 0) + tensor.elements
                    self.shards[key] += tensor.shard(parallel)
                else:
                    self.vectors[stage] += tensor.elements
        self.ends = sum(elements for (_, unit), elements in self.units.items() if unit is None)
        """Elements in the embedding and head together."""
        self.blocks: dict[int, dict[int, int]] = {stage: {} for stage in held.by_stage}
        """Elements in each block, by stage."""
        for (index, unit), elements in self.units.items():
            if isinstance(unit, int):
                self.blocks[index][unit] = elements
        self.full = self.enabled and parallel.shard == "full"
        self.has_pipeline = parallel.pp > 1
        self.scatters_each = self.full and not self.has_pipeline
        """Whether gradients are reduce-scattered after every micro-batch."""

    def gradients(self, stage: Stage, done: int) -> int:
        """Bytes of a stage's gradients after `done` backward passes."""
        if not done:
            return 0
        units = self.shards if self.scatters_each else self.units
        elements = sum(n for (index, _), n in units.items() if index == stage.index)
        return (self.vectors[stage.index] + elements) * self.stored

    def forward(self, stage: Stage, unit: int | None, later: bool) -> dict[str, int]:
        """Bytes in addition to shards during the forward pass of a unit (None: the head), by category. `later`: it is not the first
        pass of the step."""
        if not self.enabled:
            return {}
        held = later and not self.scatters_each
        newest = 0 if held or self.full else self.units.get((stage.index, unit or 0), 0) * self.compute
        return {GATHERED: self._gathered(stage, unit, held) + newest}

    def backward(self, stage: Stage, unit: int | str | None, last: bool) -> dict[str, int]:
        """The same during a backward pass. `unit`: END after the embedding's. `last`: whether it is the step's last pass."""
        if not self.enabled:
            return {}
        scatters = not self.has_pipeline and (self.full or last)
        result = {GATHERED: self._gathered(stage, unit, self.has_pipeline or not scatters)}
        if scatters and unit is not None:
            result[WORK] = self.units.get((stage.index, None if unit == END else unit), 0) * self.stored
        return result

    def new_gradients(self, stage: Stage, unit: int | None, last: bool, usual: int) -> int:
        """Bytes of gradients after a unit's first backward pass: `usual`, or those of the shards if gradients are scattered."""
        if not self.enabled or self.has_pipeline or not (self.full or last):
            return usual
        return self.shards[stage.index, unit] * self.stored

    def _gathered(self, stage: Stage, unit: int | str | None, all_of_it: bool) -> int:
        """Bytes of gathered weights, including the flat tensor of the most recently gathered unit."""
        if all_of_it:
            return sum(self.units.values()) * self.compute
        ends, blocks = self.ends, self.blocks[stage.index]
        if unit == END:
            return ends * self.compute
        if self.full:
            newest = max(blocks.values(), default=0) if unit is None else 2 * blocks[int(unit)]
            return (ends + newest) * self.compute
        return (ends + sum(n for b, n in blocks.items() if unit is None or b <= int(unit))) * self.compute


shards_of = functools.lru_cache(512)(Shards)  # a search tries each mesh with many micro-batch sizes
