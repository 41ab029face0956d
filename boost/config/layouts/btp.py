"""`btp`: bottleneck-aware tensor parallelism (arXiv 2512.12131). Shards along the wide dim and communicates at the bottleneck.

residual x [T, d/p]; A [R, d_in/p], B [d_out/p, r], gamma [d/p]; embedding [V, d/p], head [V/p, d], final gamma [d]
forward per block, online and grouped:  AR(3r + s)  AR(r)  AR(2r + s)  AR(r)
backward:                               AR(3r)      AR(r)  AR(2r)      AR(r)
"""

from collections.abc import Iterator
from typing import ClassVar, Literal

from boost.config.layouts.spec import GATHER, PARTIAL, SUM_BOTH, GroupContext, LayoutSpec, Placement, PlannedComm
from boost.config.schema import ParallelConfig
from boost.config.traffic import statistic_columns, statistic_dtype


class BTPConfig(ParallelConfig):
    """BOOST's bottleneck-aware tensor parallelism (arXiv 2512.12131)."""

    layout: Literal["btp"] = "btp"

    norm: Literal["online", "sync"] = "online"
    """RMSNorm statistics. online: all-reduced together with the latents; sync: in a separate all-reduce (the paper's ablation)."""


class BTPSpec(LayoutSpec):
    """Hidden-sharded residual stream and all-reduces of width r."""

    config: ClassVar[type[ParallelConfig]] = BTPConfig
    runtime = "boost.layouts.btp:BTP"
    low_rank = True
    residual = "hidden"
    placements: ClassVar[dict[str, Placement]] = {
        "norm": Placement(0),
        "final_norm": PARTIAL,  # every rank applies the whole final norm, then its shard of the head
        "enter.inner": Placement(1),
        "enter.outer": Placement(0),
        "kv.outer": Placement(0),
        "leave.inner": Placement(1),
        "leave.outer": Placement(0),
        "latent.rows": PARTIAL,  # gradients of latents are all-reduced after the backward pass of what mixes them
        "latent.whole": PARTIAL,
    }
    head_comms = (GATHER,)
    scaled = frozenset({"enter.inner"})  # multiplied by gamma
    searched: ClassVar[dict[str, tuple[str, ...]]] = {"norm": ("online", "sync")}

    def group_comms(self, context: GroupContext) -> Iterator[PlannedComm]:
        statistic = 0
        if context.group.side == "enter" and context.parallel.norm == "sync":
            yield PlannedComm(SUM_BOTH, 1, dtype=statistic_dtype(context.dtype))
        elif context.group.side == "enter":
            statistic = statistic_columns(context.dtype, context.parallel.tp)
        # All-reduces of partial latents, with the statistic, and of their gradients.
        yield from context.merged(SUM_BOTH, context.group.down_widths, forward_only=statistic)

    def norm_note(self, parallel: ParallelConfig) -> str:
        return "statistic sent with the latents" if parallel.norm == "online" else "statistic sent by itself"

    def variant(self, parallel: ParallelConfig) -> list[str]:
        return ["norm sync"] if parallel.norm == "sync" else []
