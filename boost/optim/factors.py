"""The factor pairs of a model, whole in rank and wherever their parts are: what optimizers of pairs stand on.

Factors are tall here, [n, r]: B as it is, A transposed. n is the wide side as this TP process holds it: a shard under the layouts
that cut it, all of it elsewhere. The rank is always whole: what replicas share, and what a layout cuts along the rank, is
gathered first. Legend: N rows of the wide side here, R whole rank, K tensors of the factor's shape, side by side.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from boost.config.architecture import Parameter
from boost.config.factors import FactorShape, factor_buckets, factor_shape, is_factor
from boost.config.optimizers import OptimConfig
from boost.models.stored import Part, Storage
from boost.parallel.collectives import all_gather, all_reduce
from boost.parallel.mesh import Mesh


@dataclass(frozen=True)
class Factor:
    """One factor of one linear, a part of a stored tensor."""

    storage: Storage
    part: Part
    shape: FactorShape
    first: int
    """Where this process's columns of the rank begin; 0 where it is not cut."""

    @property
    def parameter(self) -> Parameter:
        """The mathematical parameter."""
        return self.part.parameter

    @property
    def name(self) -> str:
        """Its name."""
        return self.parameter.name

    def tall(self, stored: Tensor) -> Tensor:
        """[rows, columns, K] of the whole stored tensor -> [N, local rank, K], a view."""
        own = self.part.view(stored)
        return own if self.parameter.role.endswith(".B") else own.transpose(0, 1)

    def own(self, kept: Tensor, tall_NR: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """(view of a kept tensor, what it is of a tall matrix [N, R] of this factor): one pair, or none where replicas keep
        all of its rows."""
        columns = self.part.rows if self.parameter.role.endswith(".A") else kept.shape[1]
        mine = tall_NR.narrow(1, self.first, columns)
        mine = mine if self.parameter.role.endswith(".B") else mine.transpose(0, 1)
        for piece in self.storage.pieces():
            if piece.parameter == self.parameter:
                yield piece.view(kept), mine.narrow(0, piece.offset, piece.rows)


@dataclass(frozen=True)
class Unit:
    """The linears of one input: their factors A are one stored tensor, so that they are gathered together."""

    pairs: tuple[tuple[Factor, Factor], ...]
    """(A, B) of each linear."""

    @property
    def factors(self) -> tuple[Factor, ...]:
        """All A, then all B, as they are stored."""
        return (*(a for a, _ in self.pairs), *(b for _, b in self.pairs))

    @property
    def storages(self) -> tuple[Storage, ...]:
        """Their stored tensors."""
        return (self.pairs[0][0].storage, *(b.storage for _, b in self.pairs))


class Factors:
    """Every pair that this process holds, in buckets of a bounded size."""

    def __init__(self, storages: Sequence[Storage], optim: OptimConfig, mesh: Mesh, dtype: torch.dtype) -> None:
        self.mesh, self.dtype = mesh, dtype
        units = list(_units(storages, mesh))
        self.buckets: list[list[Unit]] = []
        shapes = [[factor.shape for factor in unit.factors] for unit in units]
        for length in factor_buckets(shapes, optim, dtype.itemsize):
            self.buckets.append(units[:length])
            units = units[length:]

    def tall(self, bucket: Sequence[Unit], value: Callable[[Storage], Tensor]) -> dict[str, Tensor]:
        """[N, R, K] of every factor of a bucket, by name, from [kept rows, columns, K] of each of its stored tensors.

        At most one all-gather over each of: the replicas that share weights, replicas and TP processes that share outer
        factors, and TP processes among which the rank is cut. None where each process holds what it needs.
        """
        stored = [storage for unit in bucket for storage in unit.storages]
        whole = _from_replicas(stored, [value(storage).to(self.dtype) for storage in stored], self.mesh)
        by_name = {_key(storage): each for storage, each in zip(stored, whole, strict=True)}
        factors = [factor for unit in bucket for factor in unit.factors]
        return self._whole_ranks(factors, {f.name: f.tall(by_name[_key(f.storage)]) for f in factors})

    def grams(self, tall: Mapping[str, Tensor], bucket: Sequence[Unit]) -> dict[str, Tensor]:
        """T^T T [R, R] of every tall factor T [N, R] of a bucket, over all processes: at most one all-reduce over TP."""
        grams = {name: t_NR.mT @ t_NR for name, t_NR in tall.items()}
        summed = [f for unit in bucket for f in unit.factors if f.shape.gram and self.mesh.tp.size > 1]
        if summed:
            flat = all_reduce(torch.cat([grams[f.name].flatten() for f in summed]), self.mesh.tp)
            for factor, gram in zip(summed, flat.split([f.shape.gram for f in summed]), strict=True):
                grams[factor.name] = gram.view_as(grams[factor.name])
        return grams

    def _whole_ranks(self, factors: Sequence[Factor], tall: dict[str, Tensor]) -> dict[str, Tensor]:
        cut = [f.name for f in factors if f.shape.sharded == "rank" and self.mesh.tp.size > 1]
        if cut:
            p = self.mesh.tp.size
            gathered = all_gather(torch.cat([tall[name].flatten() for name in cut]), self.mesh.tp).view(p, -1)
            for name, parts in zip(cut, gathered.split([tall[name].numel() for name in cut], dim=1), strict=True):
                n, local, k = tall[name].shape
                tall[name] = parts.reshape(p, n, local, k).transpose(0, 1).reshape(n, p * local, k)
        return tall


def _units(storages: Sequence[Storage], mesh: Mesh) -> Iterator[Unit]:
    factors = {}
    for storage in storages:
        for part in storage.parts if is_factor(storage.parts[0].parameter.role) else ():
            shape = factor_shape(part.parameter, storage.placement, mesh.tp.size)
            first = mesh.tp.rank * (shape.rank // mesh.tp.size) if shape.sharded == "rank" else 0
            factors[part.parameter.name] = Factor(storage, part, shape, first)
    for storage in storages:
        names = [part.parameter.name for part in storage.parts]
        if names[0] in factors and names[0].endswith(".A"):
            yield Unit(tuple((factors[name], factors[f"{name.removesuffix('.A')}.B"]) for name in names))


def _from_replicas(stored: Sequence[Storage], kept: Sequence[Tensor], mesh: Mesh) -> list[Tensor]:
    """All rows of each stored tensor, from the rows that this process keeps of it."""
    whole = list(kept)
    for over, axis in (("dp", mesh.dp), ("replicas", mesh.replicas)):
        shared = [i for i, s in enumerate(stored) if s.shard is not None and s.shard.over == over and axis.size > 1]
        if not shared:
            continue
        shares, padded = {}, []
        for i in shared:
            rows = sum(part.rows for part in stored[i].parts)
            shares[i] = -(-rows // axis.size)
            missing = shares[i] - kept[i].shape[0]
            padded.append(torch.cat((kept[i], kept[i].new_zeros(missing, *kept[i].shape[1:]))).flatten())
        gathered = all_gather(torch.cat(padded), axis).view(axis.size, -1)
        for i, parts in zip(shared, gathered.split([x.numel() for x in padded], dim=1), strict=True):
            rows = sum(part.rows for part in stored[i].parts)
            whole[i] = parts.reshape(axis.size * shares[i], *kept[i].shape[1:])[:rows]
    return whole


def _key(storage: Storage) -> str:
    return storage.parts[0].parameter.name
