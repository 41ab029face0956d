"""Collectives and memory for optimizers that need unsharded factors: gathered factors, QR triangles, Gram matrices, solutions."""

from collections import Counter
from collections.abc import Iterator, Sequence

from boost.config.factors import Deal, FactorShape, deal_grams, deal_pairs, factor_buckets, work_dtype
from boost.config.optimizers import LOROConfig, MuonConfig
from boost.config.schema import Config, ParallelConfig
from boost.config.stages import Stage, stages_of
from boost.config.traffic import ITEMSIZE, Collective
from boost.plan.structure import FactorTensors, HeldTensors, held_tensors, processes_on

PLACE = "optimizer"


def optimizer_collectives(config: Config, pp_rank: int = 0) -> list[Collective]:
    """Collectives that unsharded factors add to a step, bucket by bucket, in order of issue.

    LORO needs them in exact steps (every optim.exact_every steps), Muon in every step; for other
    optimizers the list is empty.
    """
    optim, parallel = config.optim, config.parallel
    if not (optim.whole_factors or isinstance(optim, LOROConfig)):
        return []
    dtype, tp = work_dtype(optim, config.train.param_dtype), parallel.tp
    result = []
    for bucket in _buckets(config, held_tensors(config, stages_of(config, pp_rank))):
        shapes = [shape for unit in bucket for shape in unit.shapes]
        for axis in ("dp", "replicas"):
            shared = [t for unit in bucket for t in unit.stored if t.over(parallel) == axis]
            if shared and (p := processes_on(axis, parallel)) > 1:
                elements = optim.factor_copies * p * sum(t.shard(parallel) for t in shared)
                result.append(Collective("step", "all-gather", (elements,), dtype, p, PLACE, axis=axis))
        if ranks := sum(optim.factor_copies * shape.elements for shape in shapes if shape.sharded == "rank"):
            result.append(Collective("step", "all-gather", (ranks,), dtype, tp, PLACE))
        kind = "all-gather" if isinstance(optim, LOROConfig) else "all-reduce"
        grams = optim.factor_copies * sum(shape.gram for shape in shapes)
        if small := sum(shape.triangle(tp) for shape in shapes) if isinstance(optim, LOROConfig) else grams:
            result.append(Collective("step", kind, (small,), dtype, tp, PLACE))
        if (p := tp * parallel.dp_cp) > 1 and (deal := _deal(config, bucket)):
            result.append(Collective("step", deal.kind, (deal.elements,), dtype, p, PLACE, axis="replicas"))
    return result


def iterations(config: Config, stages: Sequence[Stage]) -> Counter[FactorShape]:
    """Counts the factors on whose Gram matrices Muon iterates in a step, along the critical path: in each bucket, those of
    the process with the most work."""
    result: Counter[FactorShape] = Counter()
    for bucket in _buckets(config, held_tensors(config, stages)):
        shapes, deal = [shape for unit in bucket for shape in unit.shapes], _deal(config, bucket)
        assert deal is not None, "Muon always distributes its iterations"
        loads = ([shapes[number] for number in deal.on(owner)] for owner in sorted(set(deal.owners)))
        result.update(max(loads, key=lambda load: sum(shape.rank**3 for shape in load)))
    return result


def _buckets(config: Config, held: HeldTensors) -> Iterator[list[FactorTensors]]:
    """Yields the factors of a process, bucket by bucket."""
    units = held.factors
    itemsize = ITEMSIZE[work_dtype(config.optim, config.train.param_dtype)]
    for length in factor_buckets([unit.shapes for unit in units], config.optim, itemsize):
        yield units[:length]
        units = units[length:]


def _deal(config: Config, bucket: Sequence[FactorTensors]) -> Deal | None:
    """How processes with the same weights divide LORO's small problems or Muon's iterations. None: nothing to divide."""
    tp, processes = config.parallel.tp, config.parallel.tp * config.parallel.dp_cp
    if isinstance(config.optim, LOROConfig):
        sides = [(b.basis(tp), a.basis(tp), a.rank) for unit in bucket for a, b in unit.pairs]
        return deal_pairs(sides, processes)
    shapes = [shape for unit in bucket for shape in unit.shapes]
    return deal_grams(shapes, processes) if isinstance(config.optim, MuonConfig) else None


def state_bytes(config: Config, held: HeldTensors) -> int:
    """Bytes of optimizer state for the stored tensors of one process."""
    optim, parallel, itemsize = config.optim, config.parallel, ITEMSIZE[config.train.param_dtype]
    moments = 2 * held.shards(parallel) * itemsize
    counted = len(held.tensors)  # each tensor has an fp32 step counter
    if isinstance(optim, MuonConfig):
        factors = [tensor for unit in held.factors for tensor in unit.stored]
        moments -= sum(tensor.shard(parallel) for tensor in factors) * itemsize
        counted -= len(factors)
    if isinstance(optim, LOROConfig):
        # Slices of a fused tensor that have different learning rates are updated separately.
        counted += sum(len(unit.scales) - 1 for unit in held.factors if len(set(unit.scales)) > 1)
    return moments + counted * ITEMSIZE["float32"]


def work_bytes(config: Config, held: HeldTensors) -> int:
    """Peak workspace of the optimizer step in bytes, in addition to optimizer state.

    torch's fused AdamW needs none. Muon gathers a bucket of factors.
    LORO's exact step gathers a bucket of factors and directions in fp64, and computes a basis of each.
    """
    optim = config.optim
    exact = isinstance(optim, LOROConfig)
    if not (optim.whole_factors or exact):
        return 0
    worst = 0
    for units in _buckets(config, held):
        bucket = _LoroBucket(units, config.parallel, _deal(config, units))
        worst = max(worst, bucket.exact() if exact else bucket.grams(config))
    return worst * ITEMSIZE[work_dtype(optim, config.train.param_dtype)]


class _LoroBucket:
    """Elements alive while a bucket of factors is processed: n r per factor, r r per small matrix."""

    def __init__(self, units: Sequence[FactorTensors], parallel: ParallelConfig, deal: Deal | None) -> None:
        self.tp = parallel.tp
        self.shapes = [shape for unit in units for shape in unit.shapes]
        self.units = units
        stored = [tensor for unit in units for tensor in unit.stored]
        self.shard = sum(tensor.shard(parallel) for tensor in stored)
        self.local = sum(tensor.elements for tensor in stored)
        """Elements on this TP process, gathered over replicas."""
        self.largest = max(tensor.shard(parallel) for tensor in stored)
        self.shared = any(tensor.shard_count(parallel) > 1 for tensor in stored)
        self.whole = sum(shape.elements for shape in self.shapes)
        self.solved = deal.part if deal else 0
        """Elements in the solutions computed by this process."""
        self.received = deal.elements if deal and parallel.tp * parallel.dp_cp > 1 else 0
        """Elements in the solutions from all processes."""
        self.rank_sharded = self.tp > 1 and any(shape.sharded == "rank" for shape in self.shapes)

    def _whole_factors(self, copies: int, held: int) -> tuple[int, int]:
        """(peak while gathering, live afterwards) elements for `copies` copies of whole factors; `held`: live copies of a shard."""
        stored, local, whole = held * self.shard, copies * self.local, copies * self.whole
        most = live = stored
        if self.shared:  # send buffer, receive buffer, assembled factors
            most, live = live + 2 * copies * self.shard + 2 * local, local
        if self.rank_sharded:
            most, live = max(most, live + whole + max(2 * local, whole)), whole
        return most, live

    def exact(self) -> int:
        """Elements in LORO's exact step: concatenated factors and directions, their bases, and the small problems."""
        making, tall = self._whole_factors(2, 2)
        bases = sum(s.rows * min(s.rows, 2 * s.rank) + min(s.rows, 2 * s.rank) * 2 * s.rank for s in self.shapes)
        final = sum(s.rows * s.basis(self.tp) + s.basis(self.tp) * 2 * s.rank for s in self.shapes)
        # The gathered triangles and, for one factor at a time, a copy, the copy's QR, and the product.
        triangles = sum(s.triangle(self.tp) for s in self.shapes) if self.tp > 1 else 0
        triangles += 3 * max(s.triangle(self.tp) for s in self.shapes) if self.tp > 1 else 0
        largest = max(s.elements for s in self.shapes)
        finding = tall + max(bases + 2 * largest, max(bases, final) + triangles + triangles // self.tp)
        sides = [(a.basis(self.tp), b.basis(self.tp), a.rank) for unit in self.units for a, b in unit.pairs]
        small = max(4 * (a * b + (a + b) * rank) for a, b, rank in sides)
        moving = final + self.solved + self.received + max(small, largest)
        return max(making + 4 * self.largest, finding, moving)

    def grams(self, config: Config) -> int:
        """Elements in a Muon step: unsharded factors, Gram matrices, and temporaries for one factor."""
        optim = config.optim
        same = work_dtype(optim, config.train.param_dtype) == config.train.param_dtype
        views = same and not (isinstance(optim, MuonConfig) and optim.muon_nesterov)
        making, tall = self._whole_factors(1, 0 if views else 1)
        rank, largest = max(s.rank for s in self.shapes), max(s.elements for s in self.shapes)
        grams = sum(s.rank**2 for s in self.shapes)
        summed = sum(s.gram for s in self.shapes) * (self.tp > 1)
        if not isinstance(optim, MuonConfig):
            return max(making, tall + max(3 * summed, grams + largest))
        # Gram matrices that need no sum are computed one at a time, by the processes that iterate on them.
        iterating = max(3 * summed, summed + self.solved + max(7 * rank**2, self.received))
        return max(making, tall + max(iterating, (self.received or self.solved) + largest))
