"""Memory that ZeRO and FSDP need in addition to shards: gathered weights, and gradients before they are reduced.

The runtime is torch's fully_shard (`boost.parallel.sharding`). A unit is a block, or the embedding and head of a stage. Weights are
gathered into one flat tensor, which lives until the next unit is gathered, and copied out of it. Gradients are copied into one flat
tensor for the reduce-scatter.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from boost.config.schema import Config
from boost.config.stages import Stage
from boost.config.traffic import ITEMSIZE
from boost.plan.categories import GATHERED, WORK
from boost.plan.replicas import StoredTensor

END = "end"
"""Key of the embedding at the end of a backward pass."""

BytesByUnit = Callable[[int | str | None], dict[str, int]]
"""Unit (block, None for the head, or END) -> bytes in addition to shards while it runs, by category."""


class Shards:
    """Memory of gathered weights and unreduced gradients on one process."""

    def __init__(self, config: Config, stages: Sequence[Stage], stored: Mapping[int, Sequence[StoredTensor]]) -> None:
        """`stored`: the stored tensors of each stage, by stage index."""
        self.parallel, train = config.parallel, config.train
        self.enabled = self.parallel.sharded
        self.stages = stages
        self.compute, self.stored = ITEMSIZE[train.compute_dtype], ITEMSIZE[train.param_dtype]
        self.units: dict[tuple[int, int | str | None], int] = {}
        """Elements of each unit, by (stage, block or None)."""
        self.shards: Counter[tuple[int, int | str | None]] = Counter()
        """Elements of the shard of each unit."""
        self.vectors: Counter[int] = Counter()
        for stage in stages:
            for tensor in stored[stage.index] if self.enabled else ():
                if tensor.shard_count(self.parallel) > 1:
                    key = stage.index, tensor.unit
                    self.units[key] = self.units.get(key, 0) + tensor.elements
                    self.shards[key] += tensor.shard(self.parallel)
                else:
                    self.vectors[stage.index] += tensor.elements
        self.ends = sum(elements for (_, unit), elements in self.units.items() if unit is None)
        """Elements of embedding and head together."""
        self.blocks = {
            stage.index: {
                unit: n for (index, unit), n in self.units.items() if index == stage.index and isinstance(unit, int)
            }
            for stage in stages
        }
        """Elements of each block, by stage."""
        self.full = self.enabled and self.parallel.shard == "full"
        self.has_pipeline = self.parallel.pp > 1

    @property
    def scatters_each(self) -> bool:
        """Whether gradients are reduce-scattered after every micro-batch."""
        return self.full and not self.has_pipeline

    def gradients(self, stage: Stage, done: int) -> int:
        """Bytes of a stage's gradients after `done` backward passes."""
        if not done:
            return 0
        held_bytes = self.vectors[stage.index] * self.stored
        if self.scatters_each:
            return held_bytes + sum(n for (index, _), n in self.shards.items() if index == stage.index) * self.stored
        return held_bytes + sum(n for (index, _), n in self.units.items() if index == stage.index) * self.stored

    def forward(self, stage: Stage, in_flight: Counter[int], backward_done: Sequence[int]) -> BytesByUnit:
        """Bytes held during a forward pass."""
        later = any(in_flight.values()) or any(backward_done)

        def held(unit: int | str | None) -> dict[str, int]:
            if not self.enabled:
                return {}
            held_bytes = later and not self.scatters_each
            newest = 0 if held_bytes or self.full else self.units.get((stage.index, int(unit or 0)), 0) * self.compute
            return {GATHERED: self._gathered(stage, unit, held_bytes) + newest}

        return held

    def backward(self, stage: Stage, last: bool) -> BytesByUnit:
        """Bytes held during a backward pass; `last`: the last one of the step. END: after the embedding's backward pass."""
        scatters = not self.has_pipeline and (self.full or last)

        def held(unit: int | str | None) -> dict[str, int]:
            if not self.enabled:
                return {}
            result = {GATHERED: self._gathered(stage, unit, self.has_pipeline or not scatters)}
            if scatters and unit is not None:
                result[WORK] = self.units.get((stage.index, None if unit == END else unit), 0) * self.stored
            return result

        return held

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
