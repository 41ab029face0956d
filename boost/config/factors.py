"""Factor shapes, buckets and work distribution for optimizers that need whole factors.

In this module, a factor is a tall matrix [n, r]: B, or A transposed. n is the local wide dim of one TP rank, r the full bottleneck
rank.
"""

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from boost.config.architecture import Parameter
from boost.config.layouts import Placement
from boost.config.optimizers import OptimConfig
from boost.config.traffic import ALL_GATHER, ALL_REDUCE, BUCKET_BYTES, bucket_lengths


@dataclass(frozen=True)
class FactorShape:
    """One factor of one linear on one TP rank."""

    rows: int
    """n: d_in of A or d_out of B, or this TP rank's shard of it."""
    rank: int
    """r, the full rank, even if it is sharded."""
    sharded: Literal["rows", "rank"] | None
    """The dimension that TP shards; None: replicated."""

    @property
    def elements(self) -> int:
        """n r."""
        return self.rows * self.rank

    def basis(self, processes: int) -> int:
        """Number of columns of an orthonormal basis of the column space of the global [n, 2 r] matrix."""
        return min(self.rows * (processes if self.sharded == "rows" else 1), 2 * self.rank)

    def triangle(self, processes: int) -> int:
        """Elements in an all-gather of the R factors from QR decompositions of [n, 2 r]; 0 if n is not sharded."""
        return processes * min(self.rows, 2 * self.rank) * 2 * self.rank if self.sharded == "rows" else 0

    @property
    def gram(self) -> int:
        """Elements in the Gram matrix to all-reduce; 0 if n is not sharded."""
        return self.rank**2 if self.sharded == "rows" else 0


def factor_shape(parameter: Parameter, placement: Placement, processes: int) -> FactorShape:
    """The local shape of a factor A (r, d_in) or B (d_out, r)."""
    rows_dim = 0 if parameter.role.endswith(".outer") else 1
    rows, rank = parameter.shape[rows_dim], parameter.shape[1 - rows_dim]
    if placement.dim is None:
        return FactorShape(rows, rank, None)
    return (
        FactorShape(rows // processes, rank, "rows") if placement.dim == rows_dim else FactorShape(rows, rank, "rank")
    )


def is_factor(role: str) -> bool:
    """Whether a parameter with this role is one of a linear's two factors."""
    return role.endswith((".inner", ".outer"))


def rate_scale(parameter: Parameter, dim: int) -> float:
    """Multiplier of a factor's learning rate in LORO's approximate step: r / d, the smaller dim of the factor divided by the
    width of the residual stream, even for the MLP's linears (as in the published code, whose models have r < d_out
    everywhere)."""
    return min(parameter.shape) / dim


def work_dtype(optim: OptimConfig, param_dtype: str) -> str:
    """Dtype for computing with whole factors and communicating them: fp64 for LORO's exact step, otherwise at least fp32."""
    return "float64" if param_dtype == "float64" else optim.factor_dtype


def factor_buckets(units: Sequence[Sequence[FactorShape]], optim: OptimConfig, itemsize: int) -> list[int]:
    """Number of consecutive `units` (factors of linears that share an input) per bucket. Factors in a bucket share collectives."""
    sizes = [itemsize * optim.factor_copies * sum(f.elements for f in unit) for unit in units]
    return bucket_lengths(sizes, optim.factor_bucket * BUCKET_BYTES)


@dataclass(frozen=True)
class Deal:
    """Assignment of small problems to processes, and the layout of the buffer in which all processes receive the solutions."""

    owners: tuple[int, ...]
    """The process that solves each problem."""
    sizes: tuple[int, ...]
    """Number of elements in each solution."""
    starts: tuple[int, ...]
    """Offset of each solution in the buffer, in elements."""
    part: int
    """Elements that each process contributes: its own part (all-gather) or the whole buffer (all-reduce)."""
    elements: int
    """Elements in the buffer, which is the payload of the collective."""
    kind: str
    """all-gather, with parts padded to the longest one; or all-reduce, with zeros for the solutions of other processes, if that
    sends less. With many more processes than problems, most of the gathered parts would be padding."""

    def on(self, process: int) -> list[int]:
        """Indices of the problems that a process solves."""
        return [number for number, owner in enumerate(self.owners) if owner == process]


def deal(costs: Sequence[int], sizes: Sequence[int], processes: int) -> Deal:
    """Assigns problems to processes greedily: the most expensive first, each to the least loaded process (ties: the lowest index).
    Problems of equal cost are assigned round-robin. `sizes`: elements in each solution."""
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
    """Assigns the iterations on the Gram matrices [r, r] of `factors`, which cost r^3 each."""
    return deal([f.rank**3 for f in factors], [f.rank**2 for f in factors], processes)


def deal_pairs(sides: Sequence[tuple[int, int, int]], processes: int) -> Deal:
    """Assigns LORO's small problems, one SVD per pair of factors. `sides`: (basis columns of B, basis columns of A, rank) per
    pair."""
    costs = [b * a * min(b, a) for b, a, _ in sides]
    return deal(costs, [(b + a) * rank for b, a, rank in sides], processes)
