"""`btp-sp`: BTP with a token-sharded residual stream. Each all-reduce becomes an all-gather or reduce-scatter of half the bytes.

residual x [T/p, d]; A of q, k, v, gate, up and B of o, down replicated; B of q, k, v, gate, up [d_out/p, r];
A of o, down [r, d_in/p]; norms replicated
forward per block, grouped:   AG(3r)  RS(r)  AG(2r)  RS(r)
backward:                     RS(3r)  AG(r)  RS(2r)  AG(r)
"""

from collections.abc import Iterator
from typing import ClassVar, Literal

from boost.config.layouts.spec import (
    EXCHANGE,
    GATHER,
    PARTIAL,
    SCATTER_SUM,
    GroupContext,
    LayoutSpec,
    Placement,
    PlannedComm,
)
from boost.config.schema import ParallelConfig


class BTPSPConfig(ParallelConfig):
    """btp with a token-sharded residual stream; sends half the bytes."""

    layout: Literal["btp-sp"] = "btp-sp"


class BTPSPSpec(LayoutSpec):
    """Token-sharded residual stream with all-gathers and reduce-scatters of width r."""

    config = BTPSPConfig
    runtime = "boost.layouts.btp_sp:BTPSP"
    low_rank = True
    residual = "tokens"
    placements: ClassVar[dict[str, Placement]] = {
        "norm": PARTIAL,
        "final_norm": PARTIAL,
        "enter.inner": PARTIAL,
        "enter.outer": Placement(0),
        "kv.outer": Placement(0),
        "leave.inner": Placement(1),
        "leave.outer": PARTIAL,
        "latent.rows": PARTIAL,
        "latent.whole": PARTIAL,
    }
    embed_comms = (EXCHANGE,)
    head_comms = (GATHER,)
    gathers_latents = True

    def group_comms(self, context: GroupContext) -> Iterator[PlannedComm]:
        group = context.group
        comm, widths = (GATHER, group.up_widths) if group.side == "enter" else (SCATTER_SUM, group.down_widths)
        yield from context.merged(comm, widths)
