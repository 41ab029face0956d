"""`btp-cp`: token-sharded residual stream and MLP; attention communicates latents or heads, whichever is narrower.

residual x [T/p, d]; weights replicated, except B (q, k, v) and A (o) of projections that communicate latents: sharded by heads
q, k, v:   r <= width/p: h = act(A norm(x)) [T/p, r], AG, B [width/p, r];   else: B h of local tokens, A2A of heads
o:         r <= d/p: A [r, d/p], RS of r, act, B;                           else: A2A of heads, then A, act, B of local tokens
forward per block:   one collective into attention, one out of it
backward:            the same two
Elements sent per token, forward and backward: 2 (min(r, d/p) + 2 min(r, d_kv/p) + min(r, d/p)) (p - 1)/p.
"""

from collections.abc import Iterator
from typing import Literal

from boost.config.architecture import Slot, groups
from boost.config.layouts.crossings import CrossingSpec, heads_width
from boost.config.layouts.spec import PARTIAL, Placement
from boost.config.schema import ModelConfig, ParallelConfig


class BTPCPConfig(ParallelConfig):
    """Fewest bytes: sharded tokens, replicated weights, local MLP; attention sends latents or heads, whichever is narrower."""

    layout: Literal["btp-cp"] = "btp-cp"


class BTPCPSpec(CrossingSpec):
    """Token-sharded residual stream and MLP; attention communicates latents or heads, whichever is narrower."""

    config = BTPCPConfig
    runtime = "boost.parallel.layouts.btp_cp:BTPCP"
    low_rank = True

    def crosses_as_heads(self, slot: Slot, model: ModelConfig, parallel: ParallelConfig) -> bool:
        """Whether one rank's heads are narrower than the widest latent of this projection in any block. All blocks use the same
        choice, and so do k and v."""
        names = ("attn.k", "attn.v") if slot.kv else (slot.name,)
        layers = range(model.layers if model.ranks else 1)
        widest = max(model.rank_of(layer, name) or 0 for layer in layers for name in names)
        return heads_width(slot, model, parallel) < widest

    def placement(self, role: str, model: ModelConfig, parallel: ParallelConfig) -> Placement:
        sharded = {"q.B": ("attn.q", Placement(0)), "kv.B": ("attn.k", Placement(0)), "o.A": ("attn.o", Placement(1))}
        if role not in sharded:
            return PARTIAL if role in self.placements else super().placement(role, model, parallel)
        name, placement = sharded[role]
        if self.crosses_as_heads(_slot(name, model), model, parallel):
            return PARTIAL
        # Fewer key/value heads than TP ranks: see LayoutSpec.placement.
        return PARTIAL if role == "kv.B" and model.kv_heads < parallel.tp else placement

    def notes(self, model: ModelConfig, parallel: ParallelConfig) -> Iterator[str]:
        words: dict[bool, list[str]] = {}
        for name in ("attn.q", "attn.k", "attn.v", "attn.o"):
            slot = _slot(name, model)
            size = f"{name[-1]} ({self.sent_to_each(slot, model, parallel)})"
            words.setdefault(self.crosses_as_heads(slot, model, parallel), []).append(size)
        crossing = [f"{', '.join(names)} as {'heads' if as_heads else 'latents'}" for as_heads, names in words.items()]
        yield f"communicated into and out of attention (elements per token and process): {'; '.join(crossing)}"
        yield from super().notes(model, parallel)


def _slot(name: str, model: ModelConfig) -> Slot:
    return next(slot for group in groups(model, 0) for slot in group.slots if slot.name == name)
