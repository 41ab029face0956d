"""Factor shapes and buckets for optimizers that need whole factors.

A factor is tall here: [n, r], B as it is and A transposed; n is the wide side as one TP process holds it, r the whole rank.
"""

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from boost.config.architecture import Parameter
from boost.config.layouts import Placement
from boost.config.schema import OptimConfig
from boost.config.traffic import ALL_GATHER, ALL_REDUCE, BUCKET_BYTES, bucket_lengths


@dataclass(frozen=True)
class FactorShape:
    """One factor of one linear on one TP process."""

    rows: int
    """n: d_in of an A, d_out of a B, or this process's part of it."""
    rank: int
    """r, the full rank even if it is sharded."""
    sharded: Literal["rows", "rank"] | None
    """The dimension that TP shards; None: replicated."""

    @property
    def elements(self) -> int:
        """n r."""
        return self.rows * self.rank

    def basis(self, processes: int) -> int:
        """Columns of an orthonormal basis of what the columns of [n, 2 r] span, of all processes together."""
        return min(self.rows * (processes if self.sharded == "rows" else 1), 2 * self.rank)

    def triangle(self, processes: int) -> int:
        """Elements that an all-gather of the triangles of the QR of [n, 2 r] gathers: nothing where n is not cut."""
        return processes * min(self.rows, 2 * self.rank) * 2 * self.rank if self.sharded == "rows" else 0

    @property
    def gram(self) -> int:
        """Elements of the Gram matrix that has to be summed over processes: nothing where n is not cut."""
        return self.rank**2 if self.sharded == "rows" else 0


def factor_shape(parameter: Parameter, placement: Placement, processes: int) -> FactorShape:
    """Of a parameter that is a factor A (r, d_in) or B (d_out, r)."""
    rows_dim = 0 if parameter.role.endswith(".B") else 1
    rows, rank = parameter.shape[rows_dim], parameter.shape[1 - rows_dim]
    if placement.dim is None:
        return FactorShape(rows, rank, None)
    return (
        FactorShape(rows // processes, rank, "rows") if placement.dim == rows_dim else FactorShape(rows, rank, "rank")
    )


def is_factor(role: str) -> bool:
    """Whether a parameter of this role is one of the two factors of a linear."""
    return role.endswith((".A", ".B"))


def rate_scale(parameter: Parameter, dim: int) -> float:
    """What LORO's approximate step multiplies the rate of a factor by: r / d, the smaller side of the factor over the width of
    the residual stream, for the linears of the MLP too (the published code; its models have r < d_out everywhere)."""
    return min(parameter.shape) / dim


def needs_whole_factors(optim: OptimConfig) -> bool:
    """Whether every step (not only one of exact_every) looks at whole factors."""
    return optim.whole_factors


def work_dtype(optim: OptimConfig, param_dtype: str) -> str:
    """Dtype in which whole factors are worked on and sent: LORO's exact step in fp64, others in fp32 at least."""
    return "float64" if param_dtype == "float64" else optim.factor_dtype


def copies(optim: OptimConfig) -> int:
    """Tensors of a factor's shape that are worked on: LORO's exact step looks at factors and directions."""
    return optim.factor_copies


def factor_buckets(units: Sequence[Sequence[FactorShape]], optim: OptimConfig, itemsize: int) -> list[int]:
    """How many of `units` (the factors of linears with one input), in order, are worked on at once, in shared collectives."""
    sizes = [itemsize * copies(optim) * sum(f.elements for f in unit) for unit in units]
    return bucket_lengths(sizes, optim.factor_bucket * BUCKET_BYTES)


@dataclass(frozen=True)
class Deal:
    """Problems dealt out to processes: who solves each, and where its solution lies in a buffer that all receive."""

    owners: tuple[int, ...]
    """The process that solves each problem."""
    sizes: tuple[int, ...]
    """Elements of each solution."""
    starts: tuple[int, ...]
    """The first element of each solution in the buffer."""
    part: int
    """Elements that each process contributes: of an all-gather its own part, of an all-reduce the whole buffer."""
    elements: int
    """Of the buffer: the payload of the collective."""
    kind: str
    """all-gather, with parts as long as the longest; all-reduce, with zeros where others solve, if that sends less: where there are
    many more processes than problems, most of the gathered parts would be padding."""

    def on(self, process: int) -> list[int]:
        """Numbers of the problems that a process solves."""
        return [number for number, owner in enumerate(self.owners) if owner == process]


def deal(costs: Sequence[int], sizes: Sequence[int], processes: int) -> Deal:
    """Deals problems of these costs, with solutions of `sizes` elements: the most expensive first, each to the process with the
    least to do, the first of several. Problems of equal cost go round in turn."""
    loads = [(0, process) for process in range(processes)]
    owners, starts, filled = [0] * len(costs), [0] * len(costs), [0] * processes
    for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
        load, owner = loads[0]
        heapq.heapreplace(loads, (load + costs[number], owner))
        owners[number], starts[number] = owner, filled[owner]
        filled[owner] += sizes[number]
    part, total = max(filled), sum(sizes)
    if processes * part <= 2 * total:
        starts = [owner * part + start for owner, start in zip(owners, starts, strict=True)]
        return Deal(tuple(owners), tuple(sizes), tuple(starts), part, processes * part, ALL_GATHER)
    starts = list(itertools.accumulate(sizes[:-1], initial=0))
    return Deal(tuple(owners), tuple(sizes), tuple(starts), total, total, ALL_REDUCE)


def deal_grams(factors: Sequence[FactorShape], processes: int) -> Deal:
    """Muon's iterations on the Gram matrices [r, r] of these factors: r^3 operations each."""
    return deal([f.rank**3 for f in factors], [f.rank**2 for f in factors], processes)


def deal_pairs(sides: Sequence[tuple[int, int, int]], processes: int) -> Deal:
    """LORO's small problems, (columns of the basis of B, of A, rank) of each pair: an SVD of a matrix of the two bases."""
    costs = [b * a * min(b, a) for b, a, _ in sides]
    return deal(costs, [(b + a) * rank for b, a, rank in sides], processes)
