"""Runtimes of `ulysses` and of `btp-cp`, which sends latents if they are narrower than heads. Shapes:
`boost.config.layouts.ulysses`.

Legend: p TP processes, T tokens, n = T/p tokens on this process; R latent width, w elements per token that one process needs
from a projection.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from boost.config.architecture import Slot
from boost.config.layouts.spec import EXCHANGE, GATHER_REPLICATED
from boost.config.layouts.ulysses import CrossingSpec
from boost.layouts.runtime import TokenSharded
from boost.models.group import LinearGroup, Outputs
from boost.models.interface import Arrived, Flow
from boost.models.kernels import projected
from boost.parallel.collectives import features_to_rows, heads_for_each, rows_to_features


class Ulysses(TokenSharded):
    """Token-sharded residual stream and MLP; q, k, v and o are exchanged."""

    spec: CrossingSpec

    def crosses_as_heads(self, slot: Slot) -> bool:
        return self.spec.crosses_as_heads(slot, self.model, self.parallel)

    def enter(self, flow: Flow, gamma: Tensor, group: LinearGroup) -> Iterator[None]:
        """gate and up: the local inputs of `up` for this process's tokens. q, k and v: one collective, or one per slot."""
        u_TR = group.policy.local(self.norm_and_down, flow.x, gamma, group)
        prev_TR = flow.take() if group.takes_prev else None
        if not _is_exchanged(group):
            flow.arrived = u_TR, prev_TR
        elif all(group.as_heads):
            outputs, kept = group.up_runner(group.up, u_TR, prev_TR)
            flow.latents += kept
            yield from self._exchange(flow, outputs, group)
        else:
            yield from self._send_latents(flow, u_TR, prev_TR, group)

    def up(self, arrived: Arrived, group: LinearGroup) -> Outputs:
        """q, k and v for this process's heads, or gate and up for its tokens."""
        return (self._split_by_slot(group, arrived), ()) if _is_exchanged(group) else group.up(*arrived)

    def down(self, hidden: Tensor, group: LinearGroup) -> Tensor:
        """The MLP's A or W. Heads are sent unchanged."""
        return hidden if _is_exchanged(group) else group.down(hidden)

    def leave(self, flow: Flow, partial: Tensor, group: LinearGroup) -> Iterator[None]:
        """o: exchanges heads to get all heads of this process's tokens, then projects them. down: the rest of the projection."""
        if _is_exchanged(group):
            heads = self.start(GATHER_REPLICATED if self.is_inference else EXCHANGE, partial)
            yield
            partial = group.down(rows_to_features(heads.wait(), self.axis))
        self.update(flow, partial, group)

    def _exchange(self, flow: Flow, outputs: Sequence[Tensor], group: LinearGroup) -> Iterator[None]:
        """All heads for this process's tokens, [n, p w] per slot -> this process's heads for all tokens."""
        parts = [self._repeat_shared_heads(y, slot) for y, slot in zip(outputs, group.shape.slots, strict=True)]
        if self.is_inference:
            flow.arrived = tuple(y.unflatten(-1, (self.size, -1))[:, self.rank] for y in parts)
            return
        sent = [parts] if self.grouping else [[part] for part in parts]
        exchanged = [self.start(EXCHANGE, features_to_rows(together, self.axis)) for together in sent]
        yield
        flow.arrived = tuple(heads.wait() for heads in exchanged)

    def _repeat_shared_heads(self, y: Tensor, slot: Slot) -> Tensor:
        """[n, width] -> [n, p w]: each process's heads side by side. Heads that several processes share are repeated."""
        if not slot.kv or not self.crosses_as_heads(slot):
            return y
        return heads_for_each(y, self.model.kv_heads, self.size)

    def _split_by_slot(self, group: LinearGroup, received: Sequence[Tensor]) -> Sequence[Tensor]:
        """Splits received tensors by slot."""
        if len(received) == len(group.shape.slots):
            return received
        return received[0].split(
            [self.spec.sent_to_each(s, self.model, self.parallel) for s in group.shape.slots], dim=-1
        )

    def _send_latents(self, flow: Flow, u_TR: Tensor, prev_TR: Tensor | None, group: LinearGroup) -> Iterator[None]:
        """Sends a group's latents if some slots do not send heads."""
        raise NotImplementedError


class BTPCP(Ulysses):
    """Latents are all-gathered before attention and reduce-scattered after it, as under `btp-sp`."""

    def up(self, arrived: Arrived, group: LinearGroup) -> Outputs:
        """Applies B's rows for this process's heads to slots that received latents. For slots that received heads: a no-op."""
        if group.shape.name != "qkv" or all(group.as_heads):
            return super().up(arrived, group)
        if not any(group.as_heads):
            return self.project(arrived[0], group)
        received = zip(self._split_by_slot(group, arrived), group.outer_by_slot(), group.as_heads, strict=True)
        return [x if is_done else projected(x, outer) for x, outer, is_done in received], ()

    def down(self, hidden: Tensor, group: LinearGroup) -> Tensor:
        """A for this process's heads, a partial sum; otherwise as under `ulysses`."""
        return group.down(hidden) if _reduces_latents(group) else super().down(hidden, group)

    def leave(self, flow: Flow, partial: Tensor, group: LinearGroup) -> Iterator[None]:
        """The sum, scattered to this process's tokens, then act and B; otherwise as under `ulysses`."""
        if not _reduces_latents(group):
            yield from super().leave(flow, partial, group)
            return
        latents = self.start(self.from_shards, partial)
        yield
        self.update(flow, latents.wait(), group)

    def _send_latents(self, flow: Flow, u_TR: Tensor, prev_TR: Tensor | None, group: LinearGroup) -> Iterator[None]:
        """Sends act(A norm(x)) for this process's tokens or, for projections that send heads, all of their heads. If a group
        sends both, one all-to-all carries everything. Latents go to every process, as in an all-gather."""
        local = group.policy.local
        h_TR, kept = local(group.activate, u_TR, prev_TR) if group.mixes else group.activate(u_TR)
        flow.latents += kept
        if not any(group.as_heads):
            gathered = self.start(self.to_shards, h_TR)
            yield
            flow.arrived = (gathered.wait(),)
            return
        own = group.by_slot(h_TR.split(group.up_widths, dim=-1), dim=-1) if self.grouping else h_TR
        sent = zip(own, group.outer_by_slot(), group.as_heads, strict=True)
        outputs = [projected(x, outer) if heads else torch.cat([x] * self.size, dim=-1) for x, outer, heads in sent]
        yield from self._exchange(flow, outputs, group)


def _is_exchanged(group: LinearGroup) -> bool:
    return group.shape.name in ("qkv", "o")


def _reduces_latents(group: LinearGroup) -> bool:
    return group.shape.name == "o" and not group.as_heads[0]
