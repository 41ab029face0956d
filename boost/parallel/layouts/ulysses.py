"""Runtime of `ulysses`; `btp-cp` overrides what is sent as latents. Shapes: `boost.config.layouts.ulysses`.

Legend: p TP processes, T tokens, n = T/p of them on this process; w elements per token of a projection that one process needs.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor

from boost.config.architecture import Slot
from boost.config.layouts.crossings import CrossingSpec
from boost.config.layouts.spec import EXCHANGE, GATHER_REPLICATED
from boost.models.group import Flow, Latents, LinearGroup
from boost.parallel.collectives import features_to_rows, heads_for_each, rows_to_features
from boost.parallel.layouts.base import TokenSharded


class Ulysses(TokenSharded):
    """Token-sharded residual stream and MLP; q, k, v and o are exchanged."""

    spec: CrossingSpec

    def crosses_as_heads(self, slot: Slot) -> bool:
        return self.spec.crosses_as_heads(slot, self.model, self.parallel)

    def enter(self, flow: Flow, gamma: Tensor, group: LinearGroup) -> Iterator[None]:
        """gate and up: local inputs of `project_in` for this process's tokens. q, k and v: one collective."""
        latents = group.policy.local(self.norm_and_inner, flow.x, gamma, group)
        prev = flow.take(group.taken) if group.taken else ()
        if not _is_exchanged(group):
            flow.arrived, flow.to_combine = tuple(latents), prev
        elif all(group.as_heads):
            outputs, new = group.outer_segment(latents, prev)
            flow.latents += new
            yield from self._exchange(flow, outputs, group)
        else:
            yield from self._send_latents(flow, latents, prev, group)

    def project_in(self, arrived: Latents, prev: Latents, group: LinearGroup) -> tuple[Sequence[Tensor], Latents]:
        """q, k and v of this process's heads, or gate and up of its tokens."""
        return (self._split_by_slot(group, arrived), ()) if _is_exchanged(group) else group.outer(arrived, prev)

    def project_out(self, hidden: Tensor, group: LinearGroup) -> Tensor:
        """The MLP's A or W. Heads are sent unchanged."""
        return hidden if _is_exchanged(group) else group.inner(hidden)[0]

    def leave(self, flow: Flow, partial: Tensor, group: LinearGroup) -> Iterator[None]:
        """o: exchanges heads for those of this process's tokens, then projects. down: the rest of the projection."""
        if _is_exchanged(group):
            heads = self.start(GATHER_REPLICATED if self.is_inference else EXCHANGE, partial)
            yield
            (partial,) = group.inner(rows_to_features(heads.wait(), self.axis))
        group.update(flow, partial)

    def _exchange(self, flow: Flow, outputs: Sequence[Tensor], group: LinearGroup) -> Iterator[None]:
        """All heads of this process's tokens, [n, p w] per slot -> this process's heads of all tokens."""
        flow.to_combine = ()
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

    def _send_latents(self, flow: Flow, latents: Sequence[Tensor], prev: Latents, group: LinearGroup) -> Iterator[None]:
        """Sends the latents of a group in which some slots do not send heads."""
        raise NotImplementedError


def _is_exchanged(group: LinearGroup) -> bool:
    return group.shape.name in ("qkv", "o")
