"""Runtime of `vanilla`, the low-rank baseline. Shapes: `boost.config.layouts.vanilla`.

Legend: p TP processes, T tokens, R = r/p latent width of a slot on this process, O output width of a slot.

The published form computes attention and the gated product of all heads and channels on every process. The strong form, the
baseline of speedup claims, shards them. Both send the same bytes. Grouping merges the collectives of linears that share an
input.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from boost.config.architecture import Slot
from boost.config.layouts.spec import GATHER, SCATTER_SUM, SUM_BACKWARD, SUM_FORWARD
from boost.models.group import LinearGroup
from boost.models.interface import Latents, Pending, Saved, Stream
from boost.models.latent_gate import LatentGate
from boost.models.linear import linear
from boost.parallel import collectives
from boost.parallel.layouts.base import Replicated


class Vanilla(Replicated):
    """Replicated residual stream, latents sharded along the rank, sums of full width."""

    lag = 3
    """Found empirically: two thirds of the bytes are hidden behind a GEMM (docs/overlap.md)."""

    def in_proj_comm(self, stream: Stream, gamma: Tensor, group: LinearGroup) -> Pending[tuple[Saved, Stream]]:
        """This process's rows of A and columns of B, then the sum of the full outputs, scattered to heads or channels if they
        are sharded."""

        def weights() -> Sequence[Tensor]:
            return group.down_weights(group.A.to(stream.x.dtype), self.grouping)

        def down(x: Tensor) -> list[Tensor]:
            normed_TD = self.norm(x, gamma)
            return [linear(collectives.sum_backward(normed_TD, self.axis), a_RD) for a_RD in weights()]

        if not self.options.split:
            return self._start_outputs(self.policy.local(down, stream.x), stream, group)
        # The sum of its gradient needs one node before and one after other work, so the normed input is saved.
        normed_TD = self.norm(stream.x, gamma)
        copies = [self.start(SUM_BACKWARD, normed_TD) for _ in group.shape.slots[: 1 if self.grouping else None]]

        def latents() -> list[Tensor]:
            return [linear(copy.wait(), a_RD) for copy, a_RD in zip(copies, weights(), strict=True)]

        return Pending(latents).then(lambda found: self._start_outputs(found, stream, group))

    def _start_outputs(
        self, latents: Sequence[Tensor], stream: Stream, group: LinearGroup
    ) -> Pending[tuple[Saved, Stream]]:
        """act and this process's columns of B, then the sum of the full outputs."""
        outputs, stream = self._activate_and_project(latents, group, stream, self.grouping)
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
        """A no-op: the collective already followed B."""
        return saved.tensors, ()

    def out_proj_local(self, hidden: Tensor, group: LinearGroup) -> Tensor:
        """This process's rows of A if it has all heads or channels; a no-op if a collective comes first."""
        if self.num_shards > 1 or self.options.split:
            return hidden
        return linear(collectives.sum_backward(hidden, self.axis), group.A)

    def out_proj_comm(self, stream: Stream, partial: Tensor, group: LinearGroup) -> Pending[Stream]:
        """All heads or channels, through this process's rows of A and columns of B, summed over processes."""

        def down(whole: Tensor) -> Tensor:
            return linear(whole, group.A)

        if self.num_shards > 1:
            parts = self.start(GATHER, partial)
            whole = Pending(lambda: collectives.rows_to_features(parts.wait(), self.axis))
            return whole.then(lambda x: self._start_update(self.policy.local(down, x), stream, group))
        if self.options.split:
            copied = self.start(SUM_BACKWARD, partial)
            return Pending(lambda: self._start_update(down(copied.wait()), stream, group))
        return self._start_update(partial, stream, group)

    def _start_update(self, u_TR: Tensor, stream: Stream, group: LinearGroup) -> Pending[Stream]:
        """act and this process's columns of B, then the sum of the full update."""
        (update,), stream = self._activate_and_project([u_TR], group, stream, True)
        summed = self.start(SUM_FORWARD, update)
        return Pending(lambda: stream.add(summed.wait()))

    def _activate_and_project(
        self, latents: Sequence[Tensor], group: LinearGroup, stream: Stream, grouped: bool
    ) -> tuple[list[Tensor], Stream]:
        """act and B. With latent gates, a gate that mixes latents needs all latents of the previous block, and LayerNorm sums
        over each whole latent."""
        gate = group.latent_gate
        if gate is None:
            outputs, new = self.up_segment(group, latents)
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

    # A method, because torch.compile does not trace a nested function whose annotation contains a tuple.
    def _norm_act_and_up(
        self, group: LinearGroup, gate: LatentGate, mixed: Sequence[Tensor], sums: Sequence[Tensor]
    ) -> tuple[list[Tensor], Latents]:
        each = zip(mixed, sums, gate.slots_of(mixed), strict=True)
        h, new = group.act([gate.apply_norm(v, stats, slots) for v, stats, slots in each])
        return group.up_proj(h), new

    def _by_slot(self, h: Tensor, gate: LatentGate, slots: range) -> Sequence[Tensor]:
        """Latents of the previous block as the gate needs them: this process's shard of each, or each whole."""
        parts = h.split([gate.ranks[slot] for slot in slots], dim=-1)
        return [collectives.rows_to_features(part, self.axis) for part in parts] if gate.mixes else parts

    def _by_process(self, y_TO: Tensor, slot: Slot) -> Tensor:
        """[T, O] -> [p, T, O/p]: the part that each process continues with. If there are fewer key/value heads than p, several
        processes get the same one."""
        if slot.kv:
            y_TO = collectives.heads_for_each(y_TO, self.model.kv_heads, self.size)
        return y_TO.view(y_TO.shape[0], self.size, -1).transpose(0, 1)
