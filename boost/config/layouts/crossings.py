"""Base of `ulysses` and `btp-cp`: replicated weights, sharded tokens, local MLP, one collective before and one after attention."""

from collections.abc import Iterator
from typing import ClassVar

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


class CrossingSpec(LayoutSpec):
    """Token-sharded residual stream and MLP; each of q, k, v and o communicates heads or latents."""

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
    mlp_token_local = True

    def crosses_as_heads(self, slot: Slot, model: ModelConfig, parallel: ParallelConfig) -> bool:
        """Whether this projection exchanges heads instead of gathering latents."""
        raise NotImplementedError

    def group_comms(self, context: GroupContext) -> Iterator[PlannedComm]:
        """One collective into attention (without grouping, one per projection), one out of it, none around the MLP."""
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
        """Elements per token of this projection that one rank needs: its heads, or the latent."""
        return heads_width(slot, model, parallel) if self.crosses_as_heads(slot, model, parallel) else slot.rank or 0

    def notes(self, model: ModelConfig, parallel: ParallelConfig) -> Iterator[str]:
        yield (
            "to shard the weights that TP replicates over dp x tp, use parallel.shard = 'full' (or 'optimizer') with "
            "parallel.shard_outer = true"
        )


def heads_width(slot: Slot, model: ModelConfig, parallel: ParallelConfig) -> int:
    """Elements per token of one rank's heads of q, k, v or o. With fewer key/value heads than ranks, this is one head."""
    width = model.kv_heads * model.head_dim if slot.kv else model.dim
    return max(width // parallel.tp, model.head_dim)
