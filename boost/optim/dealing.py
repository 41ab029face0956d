"""Small problems that several processes hold alike: each solves its part, and one collective brings every solution to all.

That is LORO's exact step in coordinates, and Muon's iteration on Gram matrices. All processes end with the same bits.
"""

from collections.abc import Callable

from torch import Tensor

from boost.config.factors import Deal
from boost.config.traffic import ALL_GATHER
from boost.parallel.collectives import all_gather, all_reduce
from boost.parallel.mesh import Axis


def solve_all(deal: Deal, solve: Callable[[int], Tensor], like: Tensor, axis: Axis) -> list[Tensor]:
    """`solve(number)`, flattened, of every problem of a deal over the processes of an axis; dtype and device of `like`.

    Each process calls `solve` for its own. One all-gather or all-reduce over the axis, as `deal` says; none for one process.
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
