"""`megatron`, the full-rank baseline: column -> row tensor parallelism for the dense model (arXiv 1909.08053).
`megatron-sp`: the same with a token-sharded residual stream ("sequence parallelism", arXiv 2205.05198).

q, k, v, gate, up: W [d_out/p, d]; o, down: W [d, d_in/p]; norms replicated
megatron: residual x [T, d]
forward per block:          AR(d) AR(d)
backward, grouped:          AR(d) AR(d)
megatron-sp: residual x [T/p, d]
forward per block:          AG(d) RS(d) AG(d) RS(d)
backward:                   AG(d) RS(d) AG(d) RS(d), and the gradients of the norms once per optimizer step
"""

from collections.abc import Iterator
from typing import ClassVar, Literal

from boost.config.layouts.spec import (
    EXCHANGE,
    GATHER,
    GATHER_REPLICATED,
    PARTIAL,
    SCATTER_SUM,
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
    """Replicated residual stream with all-reduces of width d."""

    config: ClassVar[type[ParallelConfig]] = MegatronConfig
    runtime = "boost.layouts.megatron:Megatron"
    low_rank = False
    residual: ClassVar[ResidualKind] = "replicated"
    placements: ClassVar[dict[str, Placement]] = {
        "norm": WHOLE,
        "final_norm": WHOLE,
        "enter.weight": Placement(0),
        "kv.weight": Placement(0),
        "leave.weight": Placement(1),
    }
    embed_comms = (GATHER_REPLICATED,)
    head_comms = (SUM_BACKWARD,)
    in_comm: ClassVar[Comm] = SUM_BACKWARD
    """Collective of width d from the residual stream into a group."""
    out_comm: ClassVar[Comm] = SUM_FORWARD
    """Collective of width d from a group to the residual stream."""

    def group_comms(self, context: GroupContext) -> Iterator[PlannedComm]:
        """One collective of width d into a group (without grouping, one per slot) and one out of it."""
        group, dim = context.group, context.model.dim
        if group.side == "leave":
            yield PlannedComm(self.out_comm, dim)
        else:
            yield from (
                PlannedComm(self.in_comm, dim) for _ in (group.slots[:1] if context.parallel.grouping else group.slots)
            )


class MegatronSPConfig(ParallelConfig):
    """Dense: megatron with a token-sharded residual stream (arXiv 2205.05198)."""

    layout: Literal["megatron-sp"] = "megatron-sp"


class MegatronSPSpec(MegatronSpec):
    """Token-sharded residual stream with all-gathers and reduce-scatters of width d."""

    config = MegatronSPConfig
    runtime = "boost.layouts.megatron:MegatronSP"
    residual = "tokens"
    placements: ClassVar[dict[str, Placement]] = {**MegatronSpec.placements, "norm": PARTIAL, "final_norm": PARTIAL}
    embed_comms = (EXCHANGE,)
    head_comms = (GATHER,)
    in_comm = GATHER
    out_comm = SCATTER_SUM
