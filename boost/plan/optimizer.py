"""What an optimizer sends and holds beyond what every step does: whole factors, triangles, Gram matrices. Arithmetic only."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from boost.config.architecture import Parameter, groups
from boost.config.factors import (
    FactorShape,
    copies,
    dealt,
    factor_buckets,
    factor_shape,
    needs_whole_factors,
    rate_scale,
    work_dtype,
)
from boost.config.layouts import placement_of
from boost.config.optimizers import MuonConfig
from boost.config.schema import Config, ParallelConfig
from boost.config.stages import Stage, stages_of
from boost.config.traffic import ITEMSIZE, Collective
from boost.plan.replicas import StoredTensor, stored_tensor

PLACE = "optimizer"


@dataclass(frozen=True)
class _FactorUnit:
    """The factors of the linears of one input: the A's are one stored tensor, each B one."""

    pairs: tuple[tuple[FactorShape, FactorShape], ...]
    """(A, B) of each linear."""
    stored: tuple[StoredTensor, ...]

    @property
    def shapes(self) -> tuple[FactorShape, ...]:
        """Of all factors."""
        return tuple(shape for pair in self.pairs for shape in pair)


def optimizer_collectives(config: Config, pp_rank: int = 0) -> list[Collective]:
    """Collectives of a step in which whole factors are looked at, bucket by bucket, in the order in which they are issued.

    That is LORO's exact step (every optim.exact_every steps), and each step of Muon and of Frobenius decay; [] where no
    step is one.
    """
    optim, parallel = config.optim, config.parallel
    if not (needs_whole_factors(optim) or (optim.name == "loro" and not optim.refresh_only)):
        return []
    dtype, tp = work_dtype(optim, config.train.param_dtype), parallel.tp
    units = [unit for stage in stages_of(config, pp_rank) for unit in _units(config, stage)]
    result = []
    for length in factor_buckets([unit.shapes for unit in units], optim, ITEMSIZE[dtype]):
        bucket, units = units[:length], units[length:]
        shapes = [shape for unit in bucket for shape in unit.shapes]
        for over_replicas in (False, True):
            stored = [t for unit in bucket for t in unit.stored if t.over_replicas(parallel) == over_replicas]
            shared = [t for t in stored if t.sharers(parallel) > 1]
            if shared:
                p = shared[0].sharers(parallel)
                elements = copies(optim) * p * sum(t.shard(parallel) for t in shared)
                axis = "replicas" if over_replicas else "dp"
                result.append(Collective("step", "all-gather", (elements,), dtype, p, PLACE, axis=axis))
        if ranks := sum(copies(optim) * shape.elements for shape in shapes if shape.sharded == "rank"):
            result.append(Collective("step", "all-gather", (ranks,), dtype, tp, PLACE))
        kind = "all-gather" if optim.name == "loro" else "all-reduce"
        if small := sum(shape.triangle(tp) if optim.name == "loro" else shape.gram for shape in shapes):
            result.append(Collective("step", kind, (small,), dtype, tp, PLACE))
        if optim.name == "loro" and (p := tp * parallel.dp) > 1:
            solved = [a.basis(tp) * a.rank + b.basis(tp) * b.rank for unit in bucket for a, b in unit.pairs]
            result.append(Collective("step", "all-gather", (p * dealt(solved, p),), dtype, p, PLACE, axis="replicas"))
    return result


def state_bytes(config: Config, stored: Sequence[StoredTensor], stages: Sequence[Stage]) -> int:
    """Bytes that the optimizer holds from step to step for these tensors of one process, which are those of some stages."""
    optim, parallel, itemsize = config.optim, config.parallel, ITEMSIZE[config.train.param_dtype]
    held = 2 * sum(tensor.shard(parallel) for tensor in stored) * itemsize
    counted = len(stored)  # each tensor has its number of updates, in fp32
    if optim.name == "muon":
        factors = [tensor for stage in stages for unit in _units(config, stage) for tensor in unit.stored]
        held -= sum(tensor.shard(parallel) for tensor in factors) * itemsize
        counted -= len(factors)
    if optim.name == "loro":
        counted += sum(_extra_parts(config, stage) for stage in stages)
    return held + counted * ITEMSIZE["float32"]


def work_bytes(config: Config, stages: Sequence[Stage]) -> int:
    """Bytes that the optimizer's step works with at its worst moment, on top of what it holds.

    torch's fused AdamW works with none. Muon and Frobenius decay look at a bucket of whole factors; LORO's exact step at a
    bucket of factors and directions in fp64, and at a basis of each.
    """
    optim, parallel = config.optim, config.parallel
    exact = optim.name == "loro" and not optim.refresh_only
    if not (needs_whole_factors(optim) or exact):
        return 0
    dtype, worst = work_dtype(optim, config.train.param_dtype), 0
    units = [unit for stage in stages for unit in _units(config, stage)]
    for length in factor_buckets([unit.shapes for unit in units], optim, ITEMSIZE[dtype]):
        bucket = _LoroBucket(units[:length], parallel)
        units = units[length:]
        worst = max(worst, bucket.exact() if exact else bucket.grams(config))
    return worst * ITEMSIZE[dtype]


class _LoroBucket:
    """Numbers that are alive while a bucket of factors is worked on, n r of each factor and r r of what is small."""

    def __init__(self, units: Sequence[_FactorUnit], parallel: ParallelConfig) -> None:
        self.tp, self.dp = parallel.tp, parallel.dp
        self.shapes = [shape for unit in units for shape in unit.shapes]
        self.pairs = [pair for unit in units for pair in unit.pairs]
        stored = [tensor for unit in units for tensor in unit.stored]
        self.kept = sum(tensor.shard(parallel) for tensor in stored)
        self.local = sum(tensor.elements for tensor in stored)
        """Of this TP process: all replicas' shards of it."""
        self.largest = max(tensor.shard(parallel) for tensor in stored)
        self.shared = any(tensor.sharers(parallel) > 1 for tensor in stored)
        self.whole = sum(shape.elements for shape in self.shapes)
        self.cut = self.tp > 1 and any(shape.sharded == "rank" for shape in self.shapes)

    def _tall(self, copies: int, held: int) -> tuple[int, int]:
        """(the most on the way, what is there then) of whole factors, made of `held` numbers a kept one; `copies` of each."""
        kept, local, whole = held * self.kept, copies * self.local, copies * self.whole
        most = there = kept
        if self.shared:  # what is sent, what has arrived, and what it is put together to
            most, there = there + 2 * copies * self.kept + 2 * local, local
        if self.cut:
            most, there = max(most, there + whole + max(2 * local, whole)), whole
        return most, there

    def exact(self) -> int:
        """LORO's exact step: factor and direction side by side, their bases, the small problems."""
        making, tall = self._tall(2, 2)
        bases = sum(s.rows * min(s.rows, 2 * s.rank) + min(s.rows, 2 * s.rank) * 2 * s.rank for s in self.shapes)
        final = sum(s.rows * s.basis(self.tp) + s.basis(self.tp) * 2 * s.rank for s in self.shapes)
        # Gathered; and of one factor a copy, its QR and what that is multiplied to.
        triangles = sum(s.triangle(self.tp) for s in self.shapes) if self.tp > 1 else 0
        triangles += 3 * max(s.triangle(self.tp) for s in self.shapes) if self.tp > 1 else 0
        largest = max(s.elements for s in self.shapes)
        finding = tall + max(bases + 2 * largest, max(bases, final) + triangles + triangles // self.tp)
        sides = [(a.basis(self.tp), b.basis(self.tp), a.rank) for a, b in self.pairs]
        solved = sum((a + b) * rank for a, b, rank in sides)
        small = max(4 * (a * b + (a + b) * rank) for a, b, rank in sides)
        moving = final + solved * (2 if self.tp * self.dp > 1 else 1) + max(small, largest)
        return max(making + 4 * self.largest, finding, moving)

    def grams(self, config: Config) -> int:
        """Muon's step and Frobenius decay's: whole factors, Gram matrices, and what becomes of one factor."""
        muon = isinstance(config.optim, MuonConfig)
        same = work_dtype(config.optim, config.train.param_dtype) == config.train.param_dtype
        views = same and not (isinstance(config.optim, MuonConfig) and config.optim.muon_nesterov)
        making, tall = self._tall(1, 0 if views else 1)
        rank, largest = max(s.rank for s in self.shapes), max(s.elements for s in self.shapes)
        grams = sum(s.rank**2 for s in self.shapes) + 2 * sum(s.gram for s in self.shapes) * (self.tp > 1)
        return max(making, tall + grams + largest + 6 * rank**2 * muon)


def _units(config: Config, stage: Stage) -> Iterator[_FactorUnit]:
    model, parallel = config.model, config.parallel
    if not model.low_rank:
        return

    def shape(parameter: Parameter) -> FactorShape:
        return factor_shape(parameter, placement_of(parameter.role, model, parallel), parallel.tp)

    for layer in stage.numbers:
        for group in groups(model, layer):
            downs, ups = (group.parameters(f"layers.{layer}", factor) for factor in "AB")
            stored = tuple(stored_tensor(model, parallel, layer, *each) for each in (downs, *((up,) for up in ups)))
            yield _FactorUnit(tuple((shape(a), shape(b)) for a, b in zip(downs, ups, strict=True)), stored)


def _extra_parts(config: Config, stage: Stage) -> int:
    """Parts of stored tensors that LORO updates by themselves, beyond one each: of linears of one input but different rates."""
    extra = 0
    for layer in stage.numbers:
        for group in groups(config.model, layer):
            scales = {rate_scale(a, config.model.dim) for a in group.parameters("", "A")}
            extra += len(group.slots) - 1 if len(scales) > 1 else 0
    return extra
