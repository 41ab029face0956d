"""`ulysses`: whole weights, tokens sharded; only attention crosses, as heads, by all-to-all (DeepSpeed Ulysses, arXiv 2309.14509).

residual x [T/p, d]; all weights whole, their gradients sums over tokens
forward a block:   q, k, v of own tokens -> A2A -> own heads of all tokens -> attention -> A2A;  the MLP local
backward:          the same two
"""

from collections.abc import Iterator
from typing import ClassVar, Literal

from boost.config.architecture import Slot
from boost.config.layouts.spec import (
    EXCHANGE,
    GATHER,
    PARTIAL,
    SCATTER_SUM,
    GroupContext,
    LayoutSpec,
    Placement,
    PlannedComm,
    ResidualKind,
)
from boost.config.schema import ModelConfig, ParallelConfig


class UlyssesConfig(ParallelConfig):
    """Any family: whole weights, tokens sharded, heads exchanged around attention (arXiv 2309.14509)."""

    layout: Literal["ulysses"] = "ulysses"


class UlyssesSpec(LayoutSpec):
    """Token-sharded residual and MLP, all-to-alls of heads."""

    config: ClassVar[type[ParallelConfig]] = UlyssesConfig
    runtime = "boost.parallel.layouts.ulysses:Ulysses"
    low_rank: ClassVar[bool | None] = None
    residual: ClassVar[ResidualKind] = "tokens"
    placements: ClassVar[dict[str, Placement]] = dict.fromkeys(
        (
            *("norm", "final_norm", "latent.rows", "latent.whole"),
            *(f"{side}.{factor}" for side in ("enter", "kv", "leave") for factor in "ABW"),
        ),
        PARTIAL,
    )
    embed_comms = (EXCHANGE,)
    head_comms = (GATHER,)
    mlp_stays = True

    def outdone_by(self, model: ModelConfig) -> str:
        """Where there are latents, the narrower of both crosses under `btp-cp`."""
        return "btp-cp" if model.low_rank else ""

    def crosses_as_heads(self, slot: Slot, model: ModelConfig, parallel: ParallelConfig) -> bool:
        """Whether heads of this projection are exchanged, and not its latents gathered."""
        return True

    def group_comms(self, context: GroupContext) -> Iterator[PlannedComm]:
        """One into attention (without grouping, one a projection), one out of it, none around the MLP."""
        group, model, parallel = context.group, context.model, context.parallel
        if group.name not in ("qkv", "o"):
            return
        merged = [group.slots] if parallel.grouping else [(slot,) for slot in group.slots]
        for slots in merged:
            as_heads = [self.crosses_as_heads(slot, model, parallel) for slot in slots]
            if any(as_heads):
                width = sum(self.sent_to_each(slot, model, parallel) for slot in slots)
                yield PlannedComm(EXCHANGE, parallel.tp * width)
            else:
                yield PlannedComm(
                    GATHER if group.side == "enter" else SCATTER_SUM, sum(slot.rank or 0 for slot in slots)
                )

    def sent_to_each(self, slot: Slot, model: ModelConfig, parallel: ParallelConfig) -> int:
        """Elements a token of this projection that one process needs: its heads, or the latent."""
        return heads_width(slot, model, parallel) if self.crosses_as_heads(slot, model, parallel) else slot.rank or 0

    def notes(self, model: ModelConfig, parallel: ParallelConfig) -> Iterator[str]:
        yield (
            "all weights are whole on every process of a TP group: parallel.shard = 'full' with parallel.shard_outer = true "
            "shards them over dp x tp"
        )


def heads_width(slot: Slot, model: ModelConfig, parallel: ParallelConfig) -> int:
    """Elements a token of one process's heads of q, k, v or o; of fewer key/value heads than processes, those of one head."""
    width = model.kv_heads * model.head_dim if slot.kv else model.dim
    return max(width // parallel.tp, model.head_dim)
