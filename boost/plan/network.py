"""Cost of a collective: its processes, the link that they use, and the time it takes.

Global ranks are ordered (pp, dp, cp, tp) with TP innermost, and are assigned to nodes in that order.
"""

import functools
import math
from dataclasses import dataclass

from boost.config.schema import ParallelConfig
from boost.config.traffic import ITEMSIZE, Collective
from boost.plan.hardware import Hardware


@dataclass(frozen=True)
class Span:
    """How the processes of a collective are spread over nodes."""

    processes: int
    per_node: int
    """Processes of the group on one node."""

    @property
    def inside(self) -> bool:
        """Whether the group is within one node."""
        return self.per_node >= self.processes


def span(axis: str, parallel: ParallelConfig, per_node: int) -> Span:
    """Span of one group of an axis; axes are those of `Collective.axis`."""
    return _span(axis, parallel.tp, parallel.cp, parallel.dp_cp, parallel.pp, per_node)


@functools.cache
def _span(axis: str, tp: int, cp: int, dp_cp: int, pp: int, per_node: int) -> Span:
    world = tp * dp_cp * pp
    strides = {
        "tp": (tp, 1), "cp": (cp, tp), "dp": (dp_cp, tp), "replicas": (dp_cp * tp, 1), "pp": (2, dp_cp * tp), "world": (world, 1),
    }  # fmt: skip
    size, stride = strides[axis]
    here = min(size, max(per_node // stride, 1))
    if axis == "pp" and world > per_node:
        here = 1  # some neighbors are on different nodes, and the rest wait for them
    # A group that is not aligned with nodes may span two of them: TP 3 on nodes of 4.
    if axis != "pp" and here == size and per_node % (size * stride) and world > per_node:
        here = max(size // 2, 1)
    return Span(size, here)


def seconds(collective: Collective, parallel: ParallelConfig, hardware: Hardware) -> float:
    """Seconds of one collective while all groups of its axis run it concurrently."""
    where = span(collective.axis, parallel, hardware.per_node)
    payload = collective.elements * ITEMSIZE[collective.dtype]
    link = hardware.node if where.inside else hardware.network
    # The processes of a group on one node use all of their network ports.
    share = 1.0 if where.inside or collective.kind == "send" else float(where.per_node)
    if not where.inside:
        share = min(share, hardware.node.gb_s / hardware.network.gb_s)
    sending = link.seconds(
        collective.kind, collective.dtype, payload, collective.sent_bytes, collective.processes, max(share, 1.0)
    )
    # A link's own latency covers one node, and two nodes. Over more nodes, gathers and scatters are rings: one hop per additional
    # process (NCCL, `src/graph/tuning.cc`). All-reduces are trees over nodes: two hops per doubling.
    nodes = -(-where.processes // where.per_node)
    if nodes <= 2 or collective.kind == "send":
        return sending
    if collective.kind == "all-reduce":
        return sending + 2 * math.log2(nodes / 2) * hardware.network.hop_us * 1e-6
    return sending + (nodes - 2) * (hardware.network.hop_us + (where.per_node - 1) * hardware.node.hop_us) * 1e-6
