"""What an optimizer sends and holds beyond what every step does: whole factors, triangles, Gram matrices. Arithmetic only."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from boost.config.architecture import Parameter, groups
from boost.config.cuts import cut_of
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
from boost.config.schema import Config
from boost.config.stages import Stage, stages_of
from boost.config.traffic import ITEMSIZE, Collective
from boost.plan.replicas import StoredTensor, stored_tensor

PLACE = "optimizer"


@dataclass(frozen=True)
class _Unit:
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
        if ranks := sum(copies(optim) * shape.elements for shape in shapes if shape.cut == "rank"):
            result.append(Collective("step", "all-gather", (ranks,), dtype, tp, PLACE))
        kind = "all-gather" if optim.name == "loro" else "all-reduce"
        if small := sum(shape.triangle(tp) if optim.name == "loro" else shape.gram for shape in shapes):
            result.append(Collective("step", kind, (small,), dtype, tp, PLACE))
        if optim.name == "loro" and (p := tp * parallel.dp) > 1:
            solved = [a.basis(tp) * a.rank + b.basis(tp) * b.rank for unit in bucket for a, b in unit.pairs]
            result.append(Collective("step", "all-gather", (p * dealt(solved, p),), dtype, p, PLACE, axis="replicas"))
    return result


def state_bytes(config: Config, stored: Sequence[StoredTensor]) -> int:
    """Bytes that the optimizer holds from step to step for these tensors of one process, which shares none of them."""
    optim, itemsize = config.optim, ITEMSIZE[config.train.param_dtype]
    held = 2 * sum(tensor.elements for tensor in stored) * itemsize
    counted = len(stored)  # each tensor has its number of updates, in fp32
    units = [unit for stage in stages_of(config, 0) for unit in _units(config, stage)]
    if optim.name == "muon":
        factors = [tensor for unit in units for tensor in unit.stored]
        held -= sum(tensor.elements for tensor in factors) * itemsize
        counted -= len(factors)
    if optim.name == "loro":
        counted += sum(_extra_parts(config, stage) for stage in stages_of(config, 0))
    return held + counted * ITEMSIZE["float32"]


def _units(config: Config, stage: Stage) -> Iterator[_Unit]:
    model, parallel = config.model, config.parallel
    if not model.low_rank:
        return

    def shape(parameter: Parameter) -> FactorShape:
        return factor_shape(parameter, cut_of(parameter.role, model, parallel), parallel.tp)

    for layer in stage.numbers:
        for group in groups(model, layer):
            downs, ups = (group.parameters(f"layers.{layer}", factor) for factor in "AB")
            stored = tuple(stored_tensor(model, parallel, layer, *each) for each in (downs, *((up,) for up in ups)))
            yield _Unit(tuple((shape(a), shape(b)) for a, b in zip(downs, ups, strict=True)), stored)


def _extra_parts(config: Config, stage: Stage) -> int:
    """Parts of stored tensors that LORO updates by themselves, beyond one each: of linears of one input but different rates."""
    extra = 0
    for layer in stage.numbers:
        for group in groups(config.model, layer):
            scales = {rate_scale(a, config.model.dim) for a in group.parameters("", "A")}
            extra += len(group.slots) - 1 if len(scales) > 1 else 0
    return extra
