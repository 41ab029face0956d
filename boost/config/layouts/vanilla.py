"""`vanilla`: Megatron's column -> row sharding applied to factor pairs, along the rank. The low-rank baseline.

residual x [T, d]; A [r/p, d_in], B [d_out, r/p]; norms replicated; every B yields a partial sum of full width
strong, forward per block:     RS(q, k, v to heads) AG(d) AR(d)      RS(gate, up to channels) AG(f) AR(d)
        backward:              AR(d) AG(q, k, v) RS(d)               AR(d) AG(gate, up) RS(f)
published, forward per block:  AR(d) AR(d) AR(d) AR(d)               AR(f) AR(f) AR(d)
        backward:              AR(d) AR(d)                           AR(d) AR(f)
"""

from collections.abc import Iterator
from typing import ClassVar, Literal

from boost.config.layouts.spec import (
    GATHER,
    GATHER_REPLICATED,
    PARTIAL,
    SCATTER_SUM,
    SUM_BACKWARD,
    SUM_BOTH,
    SUM_FORWARD,
    WHOLE,
    GroupContext,
    LayoutSpec,
    Placement,
    PlannedComm,
)
from boost.config.schema import ModelConfig, ParallelConfig


class VanillaConfig(ParallelConfig):
    """Baseline: low-rank factors sharded along the rank."""

    layout: Literal["vanilla"] = "vanilla"

    vanilla: Literal["strong", "published"] = "strong"
    """strong: attention and the gated product are sharded over TP ranks; published: replicated, as in the baseline of the
    BOOST paper."""


class VanillaSpec(LayoutSpec):
    """Replicated residual stream, with latents sharded along the rank and all-reduces of full width."""

    config = VanillaConfig
    runtime = "boost.layouts.vanilla:Vanilla"
    low_rank = True
    residual = "replicated"
    placements: ClassVar[dict[str, Placement]] = {
        "norm": WHOLE,
        "final_norm": WHOLE,
        "enter.inner": Placement(0),
        "enter.outer": Placement(1),
        "kv.outer": Placement(1),
        "leave.inner": Placement(0),
        "leave.outer": Placement(1),
        "latent.rows": Placement(0),
        "latent.whole": PARTIAL,
    }
    embed_comms = (GATHER_REPLICATED,)
    head_comms = (SUM_BACKWARD,)

    def superseded_by(self, model: ModelConfig) -> str:
        """`btp`, which sends 7 r elements per token instead of 4 (d + f) or more, and shards the residual stream."""
        return "btp"

    def num_shards(self, parallel: ParallelConfig) -> int:
        return 1 if parallel.vanilla == "published" else parallel.tp

    def group_comms(self, context: GroupContext) -> Iterator[PlannedComm]:
        group, model, parallel = context.group, context.model, context.parallel
        sharded = self.num_shards(parallel) > 1
        if group.side == "leave":
            yield PlannedComm(GATHER if sharded else SUM_BACKWARD, group.slots[0].d_in)
            yield from self._latent_comms(context)
            yield PlannedComm(SUM_FORWARD, model.dim)
            return
        for _ in group.slots[:1] if parallel.grouping else group.slots:
            yield PlannedComm(SUM_BACKWARD, model.dim)
        yield from self._latent_comms(context)
        if sharded:  # with fewer than p key/value heads, each is sent to every rank that uses it
            least = parallel.tp * model.head_dim
            yield from context.merged(SCATTER_SUM, [max(s.d_out, least) if s.kv else s.d_out for s in group.slots])
        else:
            yield from (PlannedComm(SUM_FORWARD, slot.d_out) for slot in group.slots)

    def _latent_comms(self, context: GroupContext) -> Iterator[PlannedComm]:
        """Gathers the previous block's latents for mathematics that mixes their elements, and sums what it needs of whole ones."""
        kind = context.group.kind
        if context.prev is not None and kind.mixes_elements:
            yield PlannedComm(GATHER, sum(context.prev.up_widths))
        if kind.sums and (kind.extra or context.prev is not None):
            yield PlannedComm(SUM_BOTH, kind.sums * len(context.group.slots), dtype="float64")

    def variant(self, parallel: ParallelConfig) -> list[str]:
        return [parallel.vanilla]
