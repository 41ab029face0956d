"""Factor pairs in a model, gathered along the rank, for optimizers that need whole factors.

Here, factors are tall, [n, r]: B as stored, A transposed. n is the local part of the wide side: a shard if the layout shards it,
otherwise all of it. The rank is never sharded here: rows sharded over replicas and factors sharded along the rank are gathered
first. Legend: N local rows of the wide side, R full rank, K tensors of the factor's shape, concatenated.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from boost.config.architecture import Parameter
from boost.config.factors import Deal, FactorShape, factor_buckets, factor_shape, is_factor
from boost.config.optimizers import OptimConfig
from boost.config.traffic import ALL_GATHER
from boost.models.fused import FusedParam, ParamSlice
from boost.parallel.collectives import all_gather, all_reduce
from boost.parallel.mesh import Axis, Mesh


@dataclass(frozen=True)
class Factor:
    """One factor of one linear: a slice of a stored tensor."""

    fused: FusedParam
    param_slice: ParamSlice
    shape: FactorShape
    first: int
    """First column of the rank on this process; 0 if the rank is not sharded."""

    @property
    def parameter(self) -> Parameter:
        """The mathematical parameter."""
        return self.param_slice.parameter

    @property
    def name(self) -> str:
        """Name of the parameter."""
        return self.parameter.name

    def tall(self, stored: Tensor) -> Tensor:
        """[rows, columns, K] of the gathered stored tensor -> [N, local rank, K], a view."""
        own = self.param_slice.view(stored)
        return own if self.parameter.role.endswith(".outer") else own.transpose(0, 1)

    def own(self, local: Tensor, tall_NR: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields (view of a local tensor, its part of this factor's tall matrix [N, R]): one pair, or none if other replicas
        hold all of its rows."""
        columns = self.param_slice.rows if self.parameter.role.endswith(".inner") else local.shape[1]
        mine = tall_NR.narrow(1, self.first, columns)
        mine = mine if self.parameter.role.endswith(".outer") else mine.transpose(0, 1)
        for param_slice in self.fused.local_slices():
            if param_slice.parameter == self.parameter:
                yield param_slice.view(local), mine.narrow(0, param_slice.offset, param_slice.rows)


@dataclass(frozen=True)
class FactorUnit:
    """Linears with the same input. Their inner maps are fused into one stored tensor and gathered together."""

    inner: tuple[Factor, ...]
    outer: tuple[Factor, ...]

    @property
    def pairs(self) -> Iterator[tuple[Factor, Factor]]:
        """(A, B) for each linear of a product B A."""
        return zip(self.inner, self.outer, strict=True)

    @property
    def factors(self) -> tuple[Factor, ...]:
        """All inner maps, then all outer ones, in storage order."""
        return (*self.inner, *self.outer)

    @property
    def fused_params(self) -> tuple[FusedParam, ...]:
        """Stored tensors that hold the factors."""
        return (self.inner[0].fused, *(b.fused for b in self.outer))


class FactorBuckets:
    """Every factor pair on this process, in buckets of bounded size."""

    def __init__(self, fused_params: Sequence[FusedParam], optim: OptimConfig, mesh: Mesh, dtype: torch.dtype) -> None:
        self.mesh, self.dtype = mesh, dtype
        units = list(_units(fused_params, mesh))
        self.buckets: list[list[FactorUnit]] = []
        shapes = [[factor.shape for factor in unit.factors] for unit in units]
        for length in factor_buckets(shapes, optim, dtype.itemsize):
            self.buckets.append(units[:length])
            units = units[length:]

    def tall(self, bucket: Sequence[FactorUnit], value: Callable[[FusedParam], Tensor]) -> dict[str, Tensor]:
        """Gathers every factor in a bucket: [local rows, columns, K] of each stored tensor -> [N, R, K] by factor name.

        Issues at most three all-gathers: over the replicas that shard weights, over the replicas and TP ranks that shard outer
        factors, and over the TP ranks that shard the rank. Omits those that no factor in the bucket needs.
        """
        stored = [fused for unit in bucket for fused in unit.fused_params]
        whole = _gather_rows(stored, [value(fused).to(self.dtype) for fused in stored], self.mesh)
        # By name: comparing two `FusedParam`s would compare their tensors.
        whole_of = {fused.slices[0].parameter.name: rows for fused, rows in zip(stored, whole, strict=True)}
        factors = [factor for unit in bucket for factor in unit.factors]
        tall = {f.name: f.tall(whole_of[f.fused.slices[0].parameter.name]) for f in factors}
        sharded = [f.name for f in factors if f.shape.sharded == "rank" and self.mesh.tp.size > 1]
        if sharded:
            p = self.mesh.tp.size
            gathered = all_gather(torch.cat([tall[name].flatten() for name in sharded]), self.mesh.tp).view(p, -1)
            sizes = [tall[name].numel() for name in sharded]
            for name, parts in zip(sharded, gathered.split(sizes, dim=1), strict=True):
                n, local, k = tall[name].shape
                tall[name] = parts.reshape(p, n, local, k).transpose(0, 1).reshape(n, p * local, k)
        return tall

    def summed_grams(self, tall: Mapping[str, Tensor], bucket: Sequence[FactorUnit]) -> dict[str, Tensor]:
        """T^T T [R, R], by name, for those tall factors T [N, R] in a bucket whose rows are sharded over TP. One all-reduce."""
        summed = [f for unit in bucket for f in unit.factors if f.shape.gram and self.mesh.tp.size > 1]
        if not summed:
            return {}
        flat = all_reduce(torch.cat([(tall[f.name].mT @ tall[f.name]).flatten() for f in summed]), self.mesh.tp)
        grams = flat.split([f.shape.gram for f in summed])
        return {f.name: gram.view(f.shape.rank, f.shape.rank) for f, gram in zip(summed, grams, strict=True)}


def _units(fused_params: Sequence[FusedParam], mesh: Mesh) -> Iterator[FactorUnit]:
    def factors(fused: FusedParam) -> Iterator[Factor]:
        for param_slice in fused.slices:
            shape = factor_shape(param_slice.parameter, fused.placement, mesh.tp.size)
            first = mesh.tp.rank * (shape.rank // mesh.tp.size) if shape.sharded == "rank" else 0
            yield Factor(fused, param_slice, shape, first)

    # In a `FusedLinearGroup`, the outer maps are stored right after the inner maps.
    stored = [fused for fused in fused_params if is_factor(fused.slices[0].parameter.role)]
    starts = [n for n, fused in enumerate(stored) if fused.slices[0].parameter.role.endswith(".inner")]
    for first, end in itertools.pairwise([*starts, len(stored)]):
        inner, *outer = (tuple(factors(fused)) for fused in stored[first:end])
        yield FactorUnit(inner, tuple(itertools.chain(*outer)))


def _gather_rows(stored: Sequence[FusedParam], local: Sequence[Tensor], mesh: Mesh) -> list[Tensor]:
    """All rows of each stored tensor, gathered from local shards."""
    whole = list(local)
    for over, axis in (("dp", mesh.dp_cp), ("replicas", mesh.replicas)):
        shared = [i for i, s in enumerate(stored) if s.shard is not None and s.shard.over == over and axis.size > 1]
        if not shared:
            continue
        shares, padded = {}, []
        for i in shared:
            rows = sum(param_slice.rows for param_slice in stored[i].slices)
            shares[i] = -(-rows // axis.size)
            missing = shares[i] - local[i].shape[0]
            padded.append(torch.cat((local[i], local[i].new_zeros(missing, *local[i].shape[1:]))).flatten())
        gathered = all_gather(torch.cat(padded), axis).view(axis.size, -1)
        for i, parts in zip(shared, gathered.split([x.numel() for x in padded], dim=1), strict=True):
            rows = sum(param_slice.rows for param_slice in stored[i].slices)
            whole[i] = parts.reshape(axis.size * shares[i], *local[i].shape[1:])[:rows]
    return whole


def solve_all(deal: Deal, solve: Callable[[int], Tensor], like: Tensor, axis: Axis) -> list[Tensor]:
    """Distributes small problems that all processes on an axis hold (LORO's exact step in coordinates, Muon's iterations on Gram
    matrices). Returns `solve(number)`, flattened, for each problem in the deal, bitwise equal on all processes.

    Each process calls `solve` for its own problems. Buffers have the dtype and device of `like`. One all-gather or all-reduce over
    the axis, as `deal` specifies; none for a single process.
    """
    own = deal.on(axis.rank)
    if axis.size == 1:
        return [solve(number).flatten() for number in own]
    gathers = deal.kind == ALL_GATHER
    buffer = like.new_zeros(deal.part)
    first = axis.rank * deal.part if gathers else 0
    for number in own:
        buffer.narrow(0, deal.starts[number] - first, deal.sizes[number]).copy_(solve(number).flatten())
    gathered = all_gather(buffer, axis) if gathers else all_reduce(buffer, axis)
    return [gathered.narrow(0, start, size) for start, size in zip(deal.starts, deal.sizes, strict=True)]
