"""Runtime of `btp-cp`: like `ulysses`, but sends latents wherever they are narrower than heads. Shapes:
`boost.config.layouts.btp_cp`.

Legend: p TP processes, T tokens, n = T/p of them on this process, R latent width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from boost.config.layouts.spec import EXCHANGE
from boost.models.group import LinearGroup
from boost.models.interface import Latents, Pending, Saved, Stream
from boost.models.linear import linear
from boost.parallel.collectives import features_to_rows
from boost.parallel.layouts.ulysses import Ulysses


class BTPCP(Ulysses):
    """Latents are all-gathered before attention and reduce-scattered after it, as under `btp-sp`."""

    def in_proj_local(self, saved: Saved, group: LinearGroup) -> tuple[Sequence[Tensor], Latents]:
        """Slots that received latents: B for this process's heads. Slots that received heads: nothing left to do."""
        as_heads = [self.crosses_as_heads(slot) for slot in group.shape.slots]
        if group.shape.name != "qkv" or all(as_heads):
            return super().in_proj_local(saved, group)
        if not any(as_heads):
            return (group.project if self.has_hand_written_nodes else group.up_proj)(saved.tensors), ()
        received = self._split_by_slot(group, saved.tensors)
        each = zip(received, group.outer_weights(received[0].dtype), as_heads, strict=True)
        return [x if done else linear(x, b) for x, b, done in each], ()

    def out_proj_local(self, hidden: Tensor, group: LinearGroup) -> Tensor:
        """A for this process's heads, a partial sum; otherwise as under `ulysses`."""
        return linear(hidden, group.A) if self._reduces_latents(group) else super().out_proj_local(hidden, group)

    def out_proj_comm(self, stream: Stream, partial: Tensor, group: LinearGroup) -> Pending[Stream]:
        """The sum, scattered to this process's tokens, then act and B; otherwise as under `ulysses`."""
        if self._reduces_latents(group):
            return self.finish_out_proj(stream, self.start(self.from_shards, partial), group)
        return super().out_proj_comm(stream, partial, group)

    def _reduces_latents(self, group: LinearGroup) -> bool:
        return group.shape.name == "o" and not self.crosses_as_heads(group.shape.slots[0])

    def _send_latents(
        self, group: LinearGroup, latents: Sequence[Tensor], prev: Latents, stream: Stream
    ) -> Pending[tuple[Saved, Stream]]:
        """Sends act(A norm(x)) of this process's tokens, or, for projections that send heads, all of their heads. If a group
        has both, one all-to-all sends everything; the latent goes to every process, as in an all-gather."""
        if group.latent_gate is None:
            h, new = group.activate(latents)
        else:
            h, new = self.policy.local(lambda prev, *u: group.activate(u, prev), prev, *latents)
        stream, slots = stream.put(new), group.shape.slots
        as_heads = [self.crosses_as_heads(slot) for slot in slots]
        if not any(as_heads):
            gathered = [self.start(self.to_shards, each) for each in h]
            return Pending(lambda: (Saved(tuple(each.wait() for each in gathered)), stream))
        own = h if len(h) > 1 else h[0].split([slot.rank or 0 for slot in slots], dim=-1)
        each = zip(own, group.outer_weights(h[0].dtype), as_heads, strict=True)
        outputs = [linear(x, b) if heads else x for x, b, heads in each]
        if not self.grouping and not self.options.inference:
            return self._send_by_slot(group, outputs, as_heads, stream)
        copies = [
            y if heads else torch.cat([y] * self.size, dim=-1) for y, heads in zip(outputs, as_heads, strict=True)
        ]
        return self._exchange(group, copies, stream)

    def _send_by_slot(
        self, group: LinearGroup, parts: Sequence[Tensor], as_heads: Sequence[bool], stream: Stream
    ) -> Pending[tuple[Saved, Stream]]:
        """One collective per projection."""
        started = []
        for part, slot, heads in zip(parts, group.shape.slots, as_heads, strict=True):
            sent = features_to_rows([self._repeat_shared_heads(part, slot)], self.axis) if heads else part
            started.append(self.start(EXCHANGE if heads else self.to_shards, sent))
        return Pending(lambda: (Saved(tuple(each.wait() for each in started)), stream))
