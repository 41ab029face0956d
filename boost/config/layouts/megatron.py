"""`megatron`: column -> row tensor parallelism of the dense model (arXiv 1909.08053), the full-rank baseline.

residual x [T, d]; q, k, v, gate, up: W [d_out/p, d]; o, down: W [d, d_in/p]; norms replicated
forward per block:          AR(d) AR(d)
backward, grouped:          AR(d) AR(d)
"""

from collections.abc import Iterator
from typing import ClassVar, Literal

from boost.config.layouts.spec import (
    GATHER_REPLICATED,
    SUM_BACKWARD,
    SUM_FORWARD,
    WHOLE,
    Comm,
    GroupContext,
    LayoutSpec,
    Placement,
    PlannedComm,
    ResidualKind,
)
from boost.config.schema import ParallelConfig


class MegatronConfig(ParallelConfig):
    """Dense: column- then row-parallel linears, replicated residual stream (arXiv 1909.08053)."""

    layout: Literal["megatron"] = "megatron"


class MegatronSpec(LayoutSpec):
    """Replicated residual stream, all-reduces of width d."""

    config: ClassVar[type[ParallelConfig]] = MegatronConfig
    runtime = "boost.parallel.layouts.megatron:Megatron"
    low_rank = False
    residual: ClassVar[ResidualKind] = "replicated"
    placements: ClassVar[dict[str, Placement]] = {
        "norm": WHOLE,
        "final_norm": WHOLE,
        "enter.W": Placement(0),
        "kv.W": Placement(0),
        "leave.W": Placement(1),
    }
    embed_comms = (GATHER_REPLICATED,)
    head_comms = (SUM_BACKWARD,)
    in_comm: ClassVar[Comm] = SUM_BACKWARD
    """Collective of width d from the residual stream into a group."""
    out_comm: ClassVar[Comm] = SUM_FORWARD
    """Collective of width d from a group to the residual stream."""

    def group_comms(self, context: GroupContext) -> Iterator[PlannedComm]:
        """One collective of width d into a group (without grouping, one per slot), one out of it."""
        group, dim = context.group, context.model.dim
        if group.side == "leave":
            yield PlannedComm(self.out_comm, dim)
        else:
            yield from (
                PlannedComm(self.in_comm, dim) for _ in (group.slots[:1] if context.parallel.grouping else group.slots)
            )
