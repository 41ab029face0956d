"""Runtime of `vanilla`, the low-rank baseline. Shapes: `boost.layouts.vanilla.spec`.

Legend: p TP processes, T tokens, R = r/p a slot's latent width on this process, O a slot's output width.

The published form computes attention and the gated product for all heads and channels on every process. The strong
form, which is the baseline for speedups, shards them. The two forms send the same number of bytes. Grouping merges the
collectives of linears that share an input.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from boost.layouts.runtime import Replicated
from boost.layouts.spec import GATHER, SCATTER_SUM, SUM_BACKWARD, SUM_BOTH, SUM_FORWARD
from boost.models.group import Flow, Latents, LinearGroup
from boost.models.kernels import linear
from boost.models.latent_gate import LatentGate
from boost.parallel import collectives


class Vanilla(Replicated):
    """Replicated residual stream, with latents sharded along the rank and sums of full width."""

    lag = 3
    """Found empirically: two thirds of the bytes are hidden behind a GEMM (docs/design.md)."""

    def enter(self, flow: Flow, gamma: Tensor, group: LinearGroup) -> Iterator[None]:
        """This process's rows of A and columns of B, then the sum of the full outputs, scattered to heads or channels if they
        are sharded."""
        if self.splits:
            # Other work runs between the collective's two nodes while the gradient is summed, so the normed input is saved.
            normed_TD = self.norm(flow.x, gamma)
            copies = [self.start(SUM_BACKWARD, normed_TD) for _ in group.shape.slots[: 1 if self.grouping else None]]
            yield
            weights = group.inner_weights(group.A)
            latents = [linear(copy.wait(), a_RD) for copy, a_RD in zip(copies, weights, strict=True)]
        else:
            latents = group.policy.local(self._norm_and_inner, flow.x, gamma, group)
        outputs = self._activate_and_project(flow, latents, group)
        if self.num_shards == 1:
            sums = [self.start(SUM_FORWARD, y_TO) for y_TO in outputs]
            yield
            flow.arrived = tuple(y.wait() for y in sums)
            return
        # [T, O] -> [p, T, O/p]: the part that each process continues with. If there are fewer than p key/value heads,
        # several processes get the same part.
        shares = []
        for y_TO, slot in zip(outputs, group.shape.slots, strict=True):
            repeated = collectives.heads_for_each(y_TO, self.model.kv_heads, self.size) if slot.kv else y_TO
            shares.append(repeated.view(repeated.shape[0], self.size, -1).transpose(0, 1))
        if self.grouping:
            merged = self.start(SCATTER_SUM, torch.cat(tuple(shares), dim=-1).flatten(0, 1))
            widths = [share.shape[-1] for share in shares]
            yield
            flow.arrived = tuple(merged.wait().split(widths, dim=-1))
        else:
            sums = [self.start(SCATTER_SUM, share.flatten(0, 1)) for share in shares]
            yield
            flow.arrived = tuple(y.wait() for y in sums)

    def _norm_and_inner(self, x: Tensor, gamma: Tensor, group: LinearGroup) -> list[Tensor]:
        """Segment: this process's rows of A norm(x)."""
        normed_TD = self.norm(x, gamma)
        weights = group.inner_weights(group.A)
        return [linear(collectives.run(SUM_BACKWARD, normed_TD, self.axis), a_RD) for a_RD in weights]

    def project_in(self, arrived: Latents, prev: Latents, group: LinearGroup) -> tuple[Sequence[Tensor], Latents]:
        """A no-op: the collective already followed B."""
        return arrived, ()

    def project_out(self, hidden: Tensor, group: LinearGroup) -> Tensor:
        """This process's rows of A if it has all heads or channels; a no-op if a collective precedes them."""
        if self.num_shards > 1 or self.splits:
            return hidden
        return linear(collectives.run(SUM_BACKWARD, hidden, self.axis), group.A)

    def leave(self, flow: Flow, partial: Tensor, group: LinearGroup) -> Iterator[None]:
        """All heads or channels, through this process's rows of A and columns of B, summed over processes."""
        if self.num_shards > 1:
            parts = self.start(GATHER, partial)
            yield
            whole = collectives.rows_to_features(parts.wait(), self.axis)
            partial = group.policy.local(linear, whole, group.A)
        elif self.splits:
            copy = self.start(SUM_BACKWARD, partial)
            yield
            partial = linear(copy.wait(), group.A)
        (update,) = self._activate_and_project(flow, [partial], group)
        summed = self.start(SUM_FORWARD, update)
        yield
        flow.add(summed.wait())

    def _activate_and_project(self, flow: Flow, latents: Sequence[Tensor], group: LinearGroup) -> list[Tensor]:
        """act and this process's columns of B. A latent gate that mixes latents needs all latents of the previous
        block, and LayerNorm sums over each whole latent."""
        gate = group.latent_gate
        if gate is None:
            outputs, new = group.outer_segment(latents)
        else:
            prev = flow.take(group.taken) if group.taken else ()
            if gate.mixes:
                prev = tuple(collectives.run(GATHER, h, self.axis) for h in prev)
            made = group.policy.local(self._gated_sum, gate, prev, *latents)
            mixed, stats = made[: len(latents)], made[len(latents) :]
            sums = [collectives.run(SUM_BOTH, stat, self.axis) for stat in stats]
            outputs, new = group.policy.local(self._norm_act_and_up, group, gate, mixed, sums)
        flow.latents += new
        return outputs

    def _gated_sum(self, gate: LatentGate, prev: Latents, *latents: Tensor) -> list[Tensor]:
        """Segment: u + G(h), one tensor per tensor of latents, followed by the statistics of each."""
        slots = gate.slots_of(latents)
        by_slot = [part for h, s in zip(prev, slots, strict=True) for part in self._by_slot(h, gate, s)]
        mixed = gate.gated_sum(latents, by_slot)
        return [*mixed, *(gate.norm_stats(v, s) for v, s in zip(mixed, slots, strict=True))]

    def _norm_act_and_up(
        self, group: LinearGroup, gate: LatentGate, mixed: Sequence[Tensor], sums: Sequence[Tensor]
    ) -> tuple[list[Tensor], Latents]:
        """Segment: LayerNorm, act and B, given the statistics of whole latents."""
        each = zip(mixed, sums, gate.slots_of(mixed), strict=True)
        h, new = group.act([gate.apply_norm(v, stats, slots) for v, stats, slots in each])
        return group.project(h), new

    def _by_slot(self, h: Tensor, gate: LatentGate, slots: range) -> Sequence[Tensor]:
        """Latents of the previous block as the gate needs them: this process's shard of each, or each one whole."""
        parts = h.split([gate.ranks[slot] for slot in slots], dim=-1)
        return [collectives.rows_to_features(part, self.axis) for part in parts] if gate.mixes else parts
