"""What replicas that share weights hold beside their shards: gathered weights, gradients before they are summed. No torch.

The runtime is torch's fully_shard (`boost.parallel.sharding`): a unit is a block, or the ends of a stage (embedding, head). A unit
is gathered into one flat tensor, from which its weights are copied; that tensor lives until the next unit is gathered. Its
gradients are copied into one flat tensor that is scattered.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from boost.config.schema import Config
from boost.config.stages import Stage
from boost.config.traffic import ITEMSIZE
from boost.plan.categories import GATHERED, WORK
from boost.plan.replicas import StoredTensor

END = "end"
"""The embedding, as the last of a backward pass."""

Held = Callable[[int | str | None], dict[str, int]]
"""Block, None for the head, or END -> what is held beside shards while it is at work."""


class Shards:
    """Of the stages of one process."""

    def __init__(self, config: Config, stages: Sequence[Stage], stored: Mapping[int, Sequence[StoredTensor]]) -> None:
        """`stored`: the stored tensors of each stage, by its index."""
        self.parallel, train = config.parallel, config.train
        self.any = self.parallel.sharded
        self.stages = stages
        self.compute, self.stored = ITEMSIZE[train.compute_dtype], ITEMSIZE[train.param_dtype]
        self.units: dict[tuple[int, int | str | None], int] = {}
        """Elements, by (stage, block or None)."""
        self.shards: Counter[tuple[int, int | str | None]] = Counter()
        """What of them stays."""
        self.vectors: Counter[int] = Counter()
        for stage in stages:
            for tensor in stored[stage.index] if self.any else ():
                if tensor.sharers(self.parallel) > 1:
                    key = stage.index, tensor.unit
                    self.units[key] = self.units.get(key, 0) + tensor.elements
                    self.shards[key] += tensor.shard(self.parallel)
                else:
                    self.vectors[stage.index] += tensor.elements
        self.full = self.any and self.parallel.shard == "full"
        self.piped = self.parallel.pp > 1

    @property
    def scatters_each(self) -> bool:
        """Whether gradients are summed behind every micro-batch."""
        return self.full and not self.piped

    def gradients(self, stage: Stage, done: int) -> int:
        """Gradients of a stage between passes, when `done` backward passes are through."""
        if not done:
            return 0
        kept = self.vectors[stage.index] * self.stored
        if self.scatters_each:
            return kept + sum(n for (index, _), n in self.shards.items() if index == stage.index) * self.stored
        return kept + sum(n for (index, _), n in self.units.items() if index == stage.index) * self.stored

    def forward(self, stage: Stage, in_flight: Counter[int], reduced: Sequence[int]) -> Held:
        """Held during a forward pass."""
        later = any(in_flight.values()) or any(reduced)

        def held(unit: int | str | None) -> dict[str, int]:
            if not self.any:
                return {}
            kept = later and not self.scatters_each
            newest = 0 if kept or self.full else self.units.get((stage.index, int(unit or 0)), 0) * self.compute
            return {GATHERED: self._gathered(stage, unit, kept) + newest}

        return held

    def backward(self, stage: Stage, last: bool) -> Held:
        """Held during a backward pass, the last one or another. END: when that of the embedding is through."""
        scatters = not self.piped and (self.full or last)

        def held(unit: int | str | None) -> dict[str, int]:
            if not self.any:
                return {}
            result = {GATHERED: self._gathered(stage, unit, self.piped or not scatters)}
            if scatters and unit is not None:
                result[WORK] = self.units.get((stage.index, None if unit == END else unit), 0) * self.stored
            return result

        return held

    def born(self, stage: Stage, unit: int | None, last: bool, usual: int) -> int:
        """Gradients that a unit's first backward pass leaves: `usual`, or shards of them."""
        if not self.any or self.piped or not (self.full or last):
            return usual
        return self.shards[stage.index, unit] * self.stored

    def _gathered(self, stage: Stage, unit: int | str | None, all_of_it: bool) -> int:
        """Weights; where they were gathered for now, also the flat tensor of the newest."""
        if all_of_it:
            return sum(self.units.values()) * self.compute
        ends = sum(n for (_, block), n in self.units.items() if block is None)
        blocks = {b: n for (index, b), n in self.units.items() if index == stage.index and isinstance(b, int)}
        if unit == END:
            return ends * self.compute
        if self.full:
            newest = max(blocks.values(), default=0) if unit is None else 2 * blocks[int(unit)]
            return (ends + newest) * self.compute
        return (ends + sum(n for b, n in blocks.items() if unit is None or b <= int(unit))) * self.compute
