"""What a collective costs on a mesh of given hardware: which processes take part, over which link, for how long. Arithmetic only.

Processes are numbered (pp, dp, tp) with TP innermost, and nodes take them in that order.
"""

from dataclasses import dataclass

from boost.config.schema import ParallelConfig
from boost.config.traffic import ITEMSIZE, Collective
from boost.plan.hardware import Hardware


@dataclass(frozen=True)
class Span:
    """How the processes of a collective lie on nodes."""

    processes: int
    per_node: int
    """Of them, on one node."""

    @property
    def inside(self) -> bool:
        """Whether one node has all of them."""
        return self.per_node >= self.processes


def span(axis: str, parallel: ParallelConfig, per_node: int) -> Span:
    """Of one group of an axis: tp | dp | replicas (dp x tp) | pp (two neighbours) | world."""
    strides = {
        "tp": (parallel.tp, 1),
        "dp": (parallel.dp, parallel.tp),
        "replicas": (parallel.dp * parallel.tp, 1),
        "pp": (2, parallel.dp * parallel.tp),
        "world": (parallel.world_size, 1),
    }
    size, stride = strides[axis]
    here = min(size, max(per_node // stride, 1))
    if axis == "pp" and parallel.world_size > per_node:
        here = 1  # some neighbours are on two nodes, and all others wait for those
    # A group that does not begin where a node begins may still cross: TP 3 on nodes of 4.
    if axis != "pp" and here == size and per_node % (size * stride) and parallel.world_size > per_node:
        here = max(size // 2, 1)
    return Span(size, here)


def seconds(collective: Collective, parallel: ParallelConfig, hardware: Hardware) -> float:
    """Time of one collective when every group of its axis does the same."""
    where = span(collective.axis, parallel, hardware.per_node)
    payload = collective.elements * ITEMSIZE[collective.dtype]
    link = hardware.node if where.inside else hardware.network
    # Between nodes, the processes of one node share what all devices of it can send together.
    share = 1.0 if where.inside or collective.kind == "send" else float(where.per_node)
    if not where.inside:
        share = min(share, hardware.node.gb_s / hardware.network.gb_s)
    return link.seconds(
        collective.kind, collective.dtype, payload, collective.sent_bytes, collective.processes, max(share, 1.0)
    )
