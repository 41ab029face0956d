"""What replicas that share weights hold beside their shards: gathered weights, and gradients before they are summed. Arithmetic only.

The runtime is torch's fully_shard (`boost.parallel.sharding`): a unit is a block, or the ends of a stage (embedding, head). A unit
is gathered into one flat tensor, from which its weights are copied; that tensor lives until the next unit is gathered. Its
gradients are copied into one flat tensor that is scattered.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from boost.config.schema import Config
from boost.config.stages import Stage
from boost.config.traffic import ITEMSIZE
from boost.plan.memory import GATHERED, WORK
from boost.plan.replicas import stored_tensors

Held = Callable[[int | None], dict[str, int]]
"""Block, or None for the ends -> what is held beside shards while it is at work."""


class Shards:
    """Of the stages of one process."""

    def __init__(self, config: Config, stages: Sequence[Stage]) -> None:
        self.parallel, train = config.parallel, config.train
        self.any = self.parallel.sharded
        self.stages = stages
        self.compute, self.stored = ITEMSIZE[train.compute_dtype], ITEMSIZE[train.param_dtype]
        self.units: dict[tuple[int, int | None], int] = {}
        """Elements, by (stage, block or None)."""
        self.vectors: Counter[int] = Counter()
        self.shared: Counter[int] = Counter()
        for stage in stages:
            for tensor in stored_tensors(config.model, self.parallel, stage):
                if tensor.sharers(self.parallel) > 1:
                    key = stage.index, tensor.unit
                    self.units[key] = self.units.get(key, 0) + tensor.elements
                    self.shared[stage.index] += tensor.shard(self.parallel)
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
            return kept + self.shared[stage.index] * self.stored
        return kept + sum(n for (index, _), n in self.units.items() if index == stage.index) * self.stored

    def forward(self, stage: Stage, in_flight: Counter[int], reduced: Sequence[int]) -> Held:
        """Held during a forward pass."""
        later = any(in_flight.values()) or any(reduced)

        def held(unit: int | None) -> dict[str, int]:
            if not self.any:
                return {}
            return {GATHERED: self._gathered(stage, unit, later and not self.scatters_each)}

        return held

    def backward(self, stage: Stage, done: int, last: bool) -> Held:
        """Held during a backward pass, the last one or another."""

        def held(unit: int | None) -> dict[str, int]:
            if not self.any:
                return {}
            own = self.units.get((stage.index, unit), 0)
            result = {GATHERED: self._gathered(stage, unit, not self.scatters_each)}
            if self.scatters_each or (last and not self.piped):
                result[WORK] = own * self.stored
            return result

        return held

    def _gathered(self, stage: Stage, unit: int | None, all_of_it: bool) -> int:
        """Weights, and the flat tensor of the newest."""
        newest = self.units.get((stage.index, unit), 0)
        ends = sum(n for (_, block), n in self.units.items() if block is None)
        if all_of_it:
            return (sum(self.units.values()) + (0 if self.piped else newest)) * self.compute
        blocks = [n for (index, block), n in self.units.items() if index == stage.index and block is not None]
        if not self.full and unit is not None:
            before = sum(n for (i, b), n in self.units.items() if i == stage.index and b is not None and b <= unit)
            return (ends + before + newest) * self.compute
        if unit is None:
            return (ends + (0 if self.full else sum(blocks)) + max(blocks, default=0)) * self.compute
        return (ends + 2 * newest) * self.compute


