"""`ulysses` and `btp-cp`: sharded tokens, a local MLP, and one collective into and one out of attention.

residual x [T/p, d]; weights replicated, their gradients partial sums over tokens
forward per block:   one collective into attention, one out of it; the MLP is local
backward:            the same two

`ulysses` (DeepSpeed Ulysses, arXiv 2309.14509): q, k, v of local tokens -> A2A -> local heads of all tokens -> attention -> A2A

`btp-cp`: sends latents or heads, whichever is narrower; if latents, B (q, k, v) and A (o) are sharded along heads
q, k, v:   r <= width/p: h = act(A norm(x)) [T/p, r], AG, B [width/p, r];   else: B h of local tokens, A2A of heads
o:         r <= d/p: A [r, d/p], RS of r, act, B;                           else: A2A of heads, then A, act, B of local tokens
Elements sent per token, forward and backward: 2 (min(r, d/p) + 2 min(r, d_kv/p) + min(r, d/p)) (p - 1)/p.
"""

from collections.abc import Iterator
from typing import ClassVar, Literal

from boost.config.architecture import Slot, linears
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
    """Base of `ulysses` and `btp-cp`: replicated weights, token-sharded residual stream and MLP, one collective into
    attention and one out of it. Each of q, k, v and o communicates heads or latents."""

    residual: ClassVar[ResidualKind] = "tokens"
    placements: ClassVar[dict[str, Placement]] = dict.fromkeys(
        (
            *("norm", "final_norm", "latent.rows", "latent.whole"),
            *(f"{side}.{kind}" for side in ("enter", "kv", "leave") for kind in ("inner", "outer", "weight")),
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
        """One collective into attention (one per projection without grouping), one out of it, none around the MLP."""
        group, model, parallel = context.group, context.model, context.parallel
        if group.name not in ("qkv", "o"):
            return
        widths = [self.sent_to_each(slot, model, parallel) for slot in group.slots]
        if any(self.crosses_as_heads(slot, model, parallel) for slot in group.slots):
            yield from context.merged(EXCHANGE, [parallel.tp * width for width in widths])
        else:
            yield from context.merged(GATHER if group.side == "enter" else SCATTER_SUM, widths)

    def sent_to_each(self, slot: Slot, model: ModelConfig, parallel: ParallelConfig) -> int:
        """Elements per token that one rank needs from this projection: its heads, or the latent."""
        return heads_width(slot, model, parallel) if self.crosses_as_heads(slot, model, parallel) else _sent_width(slot)

    def notes(self, model: ModelConfig, parallel: ParallelConfig) -> Iterator[str]:
        yield (
            "TP replicates weights; to shard them over dp x tp, set parallel.shard_outer = true and parallel.shard = 'full' "
            "(or 'optimizer')"
        )


class UlyssesConfig(ParallelConfig):
    """Any family: replicated weights, sharded tokens, heads exchanged around attention (arXiv 2309.14509)."""

    layout: Literal["ulysses"] = "ulysses"


class UlyssesSpec(CrossingSpec):
    """q, k, v and o all exchange heads."""

    config: ClassVar[type[ParallelConfig]] = UlyssesConfig
    runtime = "boost.layouts.ulysses:Ulysses"
    low_rank: ClassVar[bool | None] = None

    def superseded_by(self, model: ModelConfig) -> str:
        """`btp-cp` for low-rank families: it communicates whichever of latents and heads is narrower."""
        return "btp-cp" if model.low_rank else ""

    def crosses_as_heads(self, slot: Slot, model: ModelConfig, parallel: ParallelConfig) -> bool:
        return True


class BTPCPConfig(ParallelConfig):
    """Fewest bytes: sharded tokens, replicated weights, local MLP; attention sends latents or heads, whichever is narrower."""

    layout: Literal["btp-cp"] = "btp-cp"


class BTPCPSpec(CrossingSpec):
    """Token-sharded residual stream and MLP; attention communicates latents or heads, whichever is narrower."""

    config = BTPCPConfig
    runtime = "boost.layouts.ulysses:BTPCP"
    low_rank = True

    def crosses_as_heads(self, slot: Slot, model: ModelConfig, parallel: ParallelConfig) -> bool:
        """Whether one rank's heads are narrower than this projection's widest bottleneck over all blocks. All blocks make the same
        choice, and so do k and v."""
        names = ("attn.k", "attn.v") if slot.kv else (slot.name,)
        alike = (other for other in linears(model) if other.name in names and other.linear.outer)
        widest = max(map(_sent_width, alike), default=0)
        return heads_width(slot, model, parallel) < widest

    def placement(self, role: str, model: ModelConfig, parallel: ParallelConfig) -> Placement:
        at_heads = {"q.outer": "attn.q", "kv.outer": "attn.k", "o.inner": "attn.o"}
        if role not in at_heads:
            return PARTIAL if role in self.placements else super().placement(role, model, parallel)
        if self.crosses_as_heads(_slot(at_heads[role], model), model, parallel):
            return PARTIAL
        # Fewer key/value heads than TP ranks: see LayoutSpec.placement.
        is_copy = role == "kv.outer" and model.kv_heads < parallel.tp
        return PARTIAL if is_copy else Placement(0 if role.endswith(".outer") else 1)

    def notes(self, model: ModelConfig, parallel: ParallelConfig) -> Iterator[str]:
        words: dict[bool, list[str]] = {}
        for name in ("attn.q", "attn.k", "attn.v", "attn.o"):
            slot = _slot(name, model)
            size = f"{name[-1]} ({self.sent_to_each(slot, model, parallel)})"
            words.setdefault(self.crosses_as_heads(slot, model, parallel), []).append(size)
        crossing = [f"{', '.join(names)} as {'heads' if as_heads else 'latents'}" for as_heads, names in words.items()]
        yield f"communicated into and out of attention (elements per token and process): {'; '.join(crossing)}"
        yield from super().notes(model, parallel)


def heads_width(slot: Slot, model: ModelConfig, parallel: ParallelConfig) -> int:
    """Elements per token in one rank's heads of q, k, v or o. With fewer key/value heads than ranks, a rank has one head."""
    width = model.kv_heads * model.head_dim if slot.kv else model.heads_dim
    return max(width // parallel.tp, model.head_dim)


def _slot(name: str, model: ModelConfig) -> Slot:
    return next(slot for slot in linears(model) if slot.name == name)


def _sent_width(slot: Slot) -> int:
    """Width of the latent that this projection sends: h into q, k and v, partial sums of u out of o."""
    return slot.linear.down_width if slot.name == "attn.o" else slot.linear.up_width
