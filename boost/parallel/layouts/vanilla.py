"""Runtime of `vanilla`, the low-rank baseline. Shapes: `boost.config.layouts.vanilla`.

Legend: p TP processes, T tokens, R = r/p latent width of a slot held here, O output width of a slot.

The published form computes attention and the gated product of all heads and channels on every process; the strong one,
against which speed-ups are claimed, shards them. Both send the same bytes. Grouping merges collectives of one input.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from boost.config.architecture import Slot
from boost.config.layouts.spec import SCATTER_SUM, SUM_FORWARD
from boost.models.group import LinearGroup
from boost.models.interface import Latents, Pending, Saved, Stream
from boost.models.latent_gate import LatentGate
from boost.models.linear import linear
from boost.parallel import collectives
from boost.parallel.layouts.base import Replicated


class Vanilla(Replicated):
    """Replicated residual, latents sharded along the rank, sums of full width."""

    def in_proj_comm(self, stream: Stream, gamma: Tensor, group: LinearGroup) -> Pending[tuple[Saved, Stream]]:
        """A's rows of this process, B's columns, and the sum of the whole outputs, onto heads or channels if they are sharded."""

        def down(x: Tensor) -> list[Tensor]:
            normed_TD = self.norm(x, gamma)
            weights = group.down_weights(group.A.to(x.dtype), self.grouping)
            return [linear(collectives.sum_backward(normed_TD, self.axis), a_RD) for a_RD in weights]

        outputs, stream = self._activate_and_project(self.policy.local(down, stream.x), group, stream, self.grouping)
        if self.num_shards == 1:
            sums = [self.start(SUM_FORWARD, y_TO) for y_TO in outputs]
            return Pending(lambda: (Saved(tuple(each.wait() for each in sums)), stream))
        shares = [self._by_process(y_TO, slot) for y_TO, slot in zip(outputs, group.shape.slots, strict=True)]
        if not self.grouping:
            sums = [self.start(SCATTER_SUM, share.flatten(0, 1)) for share in shares]
            return Pending(lambda: (Saved(tuple(each.wait() for each in sums)), stream))
        merged = self.start(SCATTER_SUM, torch.cat(tuple(shares), dim=-1).flatten(0, 1))
        widths = [share.shape[-1] for share in shares]
        return Pending(lambda: (Saved(tuple(merged.wait().split(widths, dim=-1))), stream))

    def in_proj_local(self, saved: Saved, group: LinearGroup) -> tuple[Sequence[Tensor], Latents]:
        """Nothing is left to do: the collective stood after B."""
        return saved.tensors, ()

    def out_proj_local(self, hidden: Tensor, group: LinearGroup) -> Tensor:
        """A's rows of this process where all heads or channels are here; nothing where they are to be gathered first."""
        return linear(collectives.sum_backward(hidden, self.axis), group.A) if self.num_shards == 1 else hidden

    def out_proj_comm(self, stream: Stream, partial: Tensor, group: LinearGroup) -> Pending[Stream]:
        """All heads or channels, through A's rows and B's columns of this process, summed over processes."""
        if self.num_shards > 1:
            whole = collectives.rows_to_features(collectives.gather(partial, self.axis), self.axis)
            partial = self.policy.local(lambda whole: linear(whole, group.A), whole)
        (update,), stream = self._activate_and_project([partial], group, stream, True)
        summed = self.start(SUM_FORWARD, update)
        return Pending(lambda: stream.add(summed.wait()))

    def _activate_and_project(
        self, latents: Sequence[Tensor], group: LinearGroup, stream: Stream, grouped: bool
    ) -> tuple[list[Tensor], Stream]:
        """act and B. Where latents cross blocks, a gate that mixes them needs all of the previous block's, and LayerNorm sums
        over all of each."""
        gate = group.latent_gate
        if gate is None:
            outputs, new = self.policy.local(lambda *u: group.activate_and_project(u), *latents)
            return outputs, stream.put(new)
        prev, stream = group.take_latents(stream, grouped)
        slots = gate.slots_of(latents)
        if gate.mixes:
            prev = tuple(collectives.gather(h, self.axis) for h in prev)

        def gated_sum(prev: Latents, *latents: Tensor) -> list[Tensor]:
            by_slot = [part for h, s in zip(prev, slots, strict=True) for part in self._by_slot(h, gate, s)]
            mixed = gate.gated_sum(latents, by_slot)
            return [*mixed, *(gate.norm_stats(v, s) for v, s in zip(mixed, slots, strict=True))]

        found = self.policy.local(gated_sum, prev, *latents)
        sums = [collectives.sum_both(stats, self.axis) for stats in found[len(slots) :]]
        outputs, new = self.policy.local(self._norm_act_and_up, group, gate, found[: len(slots)], sums)
        return outputs, stream.put(new)

    # A method: torch.compile does not trace a nested function that is annotated with a tuple.
    def _norm_act_and_up(
        self, group: LinearGroup, gate: LatentGate, mixed: Sequence[Tensor], sums: Sequence[Tensor]
    ) -> tuple[list[Tensor], Latents]:
        each = zip(mixed, sums, gate.slots_of(mixed), strict=True)
        h, new = group.act([gate.apply_norm(v, stats, slots) for v, stats, slots in each])
        return group.up_proj(h), new

    def _by_slot(self, h: Tensor, gate: LatentGate, slots: range) -> Sequence[Tensor]:
        """Latents of the previous block as a gate takes them: its own part of each, or each whole."""
        parts = h.split([gate.ranks[slot] for slot in slots], dim=-1)
        return [collectives.rows_to_features(part, self.axis) for part in parts] if gate.mixes else parts

    def _by_process(self, y_TO: Tensor, slot: Slot) -> Tensor:
        """[T, O] -> [p, T, O/p]: what each process continues with. Key/value heads fewer than p are sent to several."""
        heads = self.model.kv_heads if slot.kv else self.size
        parts = y_TO.view(y_TO.shape[0], min(heads, self.size), -1)
        if heads < self.size:
            parts = parts.repeat_interleave(self.size // heads, dim=1)
        return parts.transpose(0, 1)
