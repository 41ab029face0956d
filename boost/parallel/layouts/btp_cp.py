"""Runtime of `btp-cp`: like `ulysses`, but sends latents wherever they are narrower than heads. Shapes:
`boost.config.layouts.btp_cp`.

Legend: p TP processes, T tokens, n = T/p of them on this process, R latent width.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from boost.config.layouts.spec import EXCHANGE
from boost.models.group import Flow, Latents, LinearGroup
from boost.models.kernels import linear
from boost.parallel.collectives import features_to_rows
from boost.parallel.layouts.ulysses import Ulysses


class BTPCP(Ulysses):
    """Latents are all-gathered before attention and reduce-scattered after it, as under `btp-sp`."""

    def project_in(self, arrived: Latents, prev: Latents, group: LinearGroup) -> tuple[Sequence[Tensor], Latents]:
        """Slots that received latents: B for this process's heads. Slots that received heads: nothing left to do."""
        if group.shape.name != "qkv" or all(group.as_heads):
            return super().project_in(arrived, prev, group)
        if not any(group.as_heads):
            return group.project_in_one_node(arrived), ()
        received = zip(self._split_by_slot(group, arrived), group.weights(), group.as_heads, strict=True)
        return [x if is_done else linear(x, b) for x, b, is_done in received], ()

    def project_out(self, hidden: Tensor, group: LinearGroup) -> Tensor:
        """A for this process's heads, a partial sum; otherwise as under `ulysses`."""
        return linear(hidden, group.A) if _reduces_latents(group) else super().project_out(hidden, group)

    def leave(self, flow: Flow, partial: Tensor, group: LinearGroup) -> Iterator[None]:
        """The sum, scattered to this process's tokens, then act and B; otherwise as under `ulysses`."""
        if not _reduces_latents(group):
            yield from super().leave(flow, partial, group)
            return
        latents = self.start(self.from_shards, partial)
        yield
        group.update(flow, latents.wait())

    def _send_latents(self, flow: Flow, latents: Sequence[Tensor], prev: Latents, group: LinearGroup) -> Iterator[None]:
        """Sends act(A norm(x)) of this process's tokens, or, for projections that send heads, all of their heads. If a group
        has both, one all-to-all sends everything (without grouping, one collective per projection); the latent goes to every
        process, as in an all-gather."""
        h, new = group.activate_segment(latents, prev)
        flow.latents += new
        flow.to_combine = ()
        slots = group.shape.slots
        if not any(group.as_heads):
            started = [self.start(self.to_shards, h_TR) for h_TR in h]
            yield
            flow.arrived = tuple(latent.wait() for latent in started)
            return
        own = h if len(h) > 1 else h[0].split([slot.rank or 0 for slot in slots], dim=-1)
        mixed = zip(own, group.weights(), group.as_heads, strict=True)
        outputs = [linear(x, b) if heads else x for x, b, heads in mixed]
        if self.grouping or self.is_inference:
            copies = zip(outputs, group.as_heads, strict=True)
            yield from self._exchange(
                flow, [y if heads else torch.cat([y] * self.size, dim=-1) for y, heads in copies], group
            )
            return
        started = []
        for part, slot, heads in zip(outputs, slots, group.as_heads, strict=True):
            sent = features_to_rows([self._repeat_shared_heads(part, slot)], self.axis) if heads else part
            started.append(self.start(EXCHANGE if heads else self.to_shards, sent))
        yield
        flow.arrived = tuple(part.wait() for part in started)


def _reduces_latents(group: LinearGroup) -> bool:
    return group.shape.name == "o" and not group.as_heads[0]
