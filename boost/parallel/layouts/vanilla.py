"""`vanilla`: Megatron's column -> row cut applied to the factor pairs, along the rank: the low-rank baseline.

Legend: p TP processes, T tokens, d hidden width, R = r/p latent width of a slot held here, O output width of a slot.

    residual x [T, d]; A [r/p, d_in], B [d_out, r/p]; norms whole; every B ends in a partial sum of full width
    strong, forward a block:     RS(q, k, v onto heads) AG(d) AR(d)    RS(gate, up onto channels) AG(f) AR(d)
            backward:            AR(d) AG(q, k, v) RS(d)               AR(d) AG(gate, up) RS(f)
    published, forward a block:  AR(d) AR(d) AR(d) AR(d)               AR(f) AR(f) AR(d)
            backward:            AR(d) AR(d)                           AR(d) AR(f)

The published form computes attention and the gated product of all heads and channels on every process; the strong one,
against which speed-ups are claimed, cuts them. Both send the same bytes. Grouping merges collectives of one input.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from boost.config.architecture import Slot
from boost.models.crossing import Crossing
from boost.models.group import Group
from boost.models.interface import Latents, Runner
from boost.parallel import collectives
from boost.parallel.layouts.residual import Replicated


class Vanilla(Replicated):
    """Replicated residual, latents cut along the rank, sums of full width."""

    name = "vanilla"

    def latent_shape(self, group: Group, tokens: int) -> tuple[int, int]:
        """All tokens' rows of them: latents are cut along the rank."""
        return tokens, sum(group.shape.ranks) // self.size

    def enter(
        self, x: Tensor, gamma: Tensor, group: Group, carried: Latents, local: Runner
    ) -> tuple[Sequence[Tensor], Latents]:
        """A's rows of this process, B's columns, and the sum of the whole outputs, onto heads or channels if they are cut."""

        def down(x: Tensor) -> list[Tensor]:
            normed_TD = self.norm(x, gamma)
            weights = group.down_weights(group.A.to(x.dtype), self.grouping)
            return [F.linear(collectives.sum_backward(normed_TD, self.axis), a_RD) for a_RD in weights]

        outputs, carried = self._bend_up(local(down, x), group, carried, local)
        if self.wide == 1:
            return self._sums(outputs), carried
        shares = [self._by_process(y_TO, slot) for y_TO, slot in zip(outputs, group.shape.slots, strict=True)]
        return self._scattered(shares), carried

    def open(self, kept: Sequence[Tensor], group: Group, carried: Latents) -> tuple[Sequence[Tensor], Latents]:
        """Nothing is left to do: the collective stood behind B."""
        return kept, carried

    def close(self, a: Tensor, group: Group) -> Tensor:
        """A's rows of this process where all heads or channels are here; nothing where they are to be gathered first."""
        return F.linear(collectives.sum_backward(a, self.axis), group.A.to(a.dtype)) if self.wide == 1 else a

    def leave(self, closed: Tensor, group: Group, carried: Latents, local: Runner) -> tuple[Tensor, Latents]:
        """All heads or channels, through A's rows and B's columns of this process, summed over processes."""
        if self.wide > 1:
            whole = collectives.rows_to_features(collectives.gather(closed, self.axis), self.axis)
            closed = local(lambda whole: F.linear(whole, group.A.to(whole.dtype)), whole)
        (update,), carried = self._bend_up([closed], group, carried, local)
        return collectives.sum_forward(update, self.axis), carried

    def _bend_up(
        self, latents: Sequence[Tensor], group: Group, carried: Latents, local: Runner
    ) -> tuple[list[Tensor], Latents]:
        """act and B. Where latents cross: a gate that mixes them needs all of those of the block before, and LayerNorm sums
        over all of each."""
        crossing = group.crossing
        if crossing is None:
            return local(lambda waiting, *latents: group.bend_up(latents, waiting), carried, *latents)
        arrived, carried = group.arrive(latents, carried)
        slots = crossing.slots_of(latents)
        if crossing.mixes:
            arrived = tuple(collectives.gather(h, self.axis) for h in arrived)

        def mix(arrived: Latents, *latents: Tensor) -> list[Tensor]:
            mixed = crossing.mix(
                latents, [part for h, s in zip(arrived, slots, strict=True) for part in self._by_slot(h, crossing, s)]
            )
            return [*mixed, *(crossing.moments(v, s) for v, s in zip(mixed, slots, strict=True))]

        def settle(carried: Latents, *found: Tensor) -> tuple[list[Tensor], Latents]:
            pairs = zip(found[: len(slots)], found[len(slots) :], slots, strict=True)
            bent = group.act([crossing.settle(mixed, moments, s) for mixed, moments, s in pairs])
            return group.up(bent), group.carry_on(bent, carried)

        found = local(mix, arrived, *latents)
        sums = [collectives.sum_both(moments, self.axis) for moments in found[len(slots) :]]
        return local(settle, carried, *found[: len(slots)], *sums)

    def _by_slot(self, h: Tensor, crossing: Crossing, slots: range) -> Sequence[Tensor]:
        """Latents of the block before as a gate takes them: its own part of each, or each whole."""
        parts = h.split([crossing.ranks[slot] for slot in slots], dim=-1)
        return [collectives.rows_to_features(part, self.axis) for part in parts] if crossing.mixes else parts

    def _sums(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        return [collectives.sum_forward(y_TO, self.axis) for y_TO in outputs]

    def _by_process(self, y_TO: Tensor, slot: Slot) -> Tensor:
        """[T, O] -> [p, T, O/p]: what each process goes on with. Key/value heads fewer than p are sent to several."""
        heads = self.model.kv_heads if slot.kv else self.size
        parts = y_TO.view(y_TO.shape[0], min(heads, self.size), -1)
        if heads < self.size:
            parts = parts.repeat_interleave(self.size // heads, dim=1)
        return parts.transpose(0, 1)

    def _scattered(self, shares: Sequence[Tensor]) -> list[Tensor]:
        """Partial sums [p, T, O/p] -> this process's sums [T, O/p], in one reduce-scatter or one each."""
        if not self.grouping:
            return [collectives.scatter_sum(share.flatten(0, 1), self.axis) for share in shares]
        merged = collectives.scatter_sum(torch.cat(tuple(shares), dim=-1).flatten(0, 1), self.axis)
        return list(merged.split([share.shape[-1] for share in shares], dim=-1))
