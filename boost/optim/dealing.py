"""Distributes small problems that several processes hold alike: each process solves its share, and one collective sends every
solution to all.

Used for LORO's exact step in coordinates and for Muon's iteration on Gram matrices. All processes end with bitwise equal
results.
"""

from collections.abc import Callable

from torch import Tensor

from boost.config.factors import Deal
from boost.config.traffic import ALL_GATHER
from boost.parallel.collectives import all_gather, all_reduce
from boost.parallel.mesh import Axis


def solve_all(deal: Deal, solve: Callable[[int], Tensor], like: Tensor, axis: Axis) -> list[Tensor]:
    """Solves every problem of a deal over the processes of an axis. Returns `solve(number)`, flattened, for each.

    Each process calls `solve` for its own problems. Buffers have dtype and device of `like`. One all-gather or all-reduce over
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
