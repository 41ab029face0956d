"""Runtime of `ulysses`; `btp-cp` overrides what is sent as latents. Shapes: `boost.config.layouts.ulysses`.

Legend: p TP processes, T tokens, n = T/p of them on this process; w elements per token of a projection that one process needs.
"""

from collections.abc import Sequence

from torch import Tensor

from boost.config.architecture import Slot
from boost.config.layouts.crossings import CrossingSpec
from boost.config.layouts.spec import EXCHANGE, GATHER_REPLICATED
from boost.models.group import LinearGroup
from boost.models.interface import Done, Latents, Pending, Saved, Stream
from boost.models.linear import linear
from boost.parallel.collectives import InFlight, features_to_rows, heads_for_each, rows_to_features
from boost.parallel.layouts.base import TokenSharded


class Ulysses(TokenSharded):
    """Token-sharded residual stream and MLP; q, k, v and o are exchanged."""

    spec: CrossingSpec

    def crosses_as_heads(self, slot: Slot) -> bool:
        return self.spec.crosses_as_heads(slot, self.model, self.parallel)

    def in_proj_comm(self, stream: Stream, gamma: Tensor, group: LinearGroup) -> Pending[tuple[Saved, Stream]]:
        """gate and up: local inputs of `in_proj_local` for this process's tokens. q, k and v: one collective."""
        if not group.low_rank:
            normed = self.norm(stream.x, gamma)
            if not _is_exchanged(group):
                return Done((Saved((normed,)), stream))
            return self._exchange(group, group.dense(Saved((normed,)), self.grouping), stream)

        def down(x: Tensor) -> list[Tensor]:
            return group.down_proj(self.norm(x, gamma), self.grouping)

        latents = self.policy.local(down, stream.x)
        prev, stream = group.take_latents(stream, self.grouping)
        if not _is_exchanged(group):
            return Done((Saved(tuple(latents), prev), stream))
        if all(self.crosses_as_heads(slot) for slot in group.shape.slots):
            outputs, new = self.up_segment(group, latents, prev)
            return self._exchange(group, outputs, stream.put(new))
        return self._send_latents(group, latents, prev, stream)

    def in_proj_local(self, saved: Saved, group: LinearGroup) -> tuple[Sequence[Tensor], Latents]:
        """q, k and v of this process's heads, or gate and up of its tokens."""
        if _is_exchanged(group):
            return self._split_by_slot(group, saved.tensors), ()
        if not group.low_rank:
            return group.dense(saved, self.grouping), ()
        if self.keeps_latents_only(group):
            return group.scale_act_and_project(saved.tensors, None), ()
        return group.activate_and_project(saved.tensors, saved.prev_latents)

    def out_proj_local(self, hidden: Tensor, group: LinearGroup) -> Tensor:
        """The MLP's A or W. Heads are sent unchanged."""
        if _is_exchanged(group):
            return hidden
        return linear(hidden, group.A) if group.low_rank else group.dense_out(hidden)

    def out_proj_comm(self, stream: Stream, partial: Tensor, group: LinearGroup) -> Pending[Stream]:
        """o: exchanges heads for those of this process's tokens, then projects. down: the rest of the projection."""
        if not _is_exchanged(group):
            return Done(self._update(stream, partial, group) if group.low_rank else stream.add(partial))
        started = self.start(GATHER_REPLICATED if self.options.inference else EXCHANGE, partial)

        def finish() -> Stream:
            heads = rows_to_features(started.wait(), self.axis)
            if not group.low_rank:
                return stream.add(group.dense_out(heads))
            return self._update(stream, linear(heads, group.A), group)

        return Pending(finish)

    def _update(self, stream: Stream, latents: Tensor, group: LinearGroup) -> Stream:
        """Adds the update B act(u) of an out-projection to the stream."""
        return self.finish_out_proj(stream, InFlight(lambda: latents), group).wait()  # type: ignore[return-value]

    def _exchange(self, group: LinearGroup, outputs: Sequence[Tensor], stream: Stream) -> Pending[tuple[Saved, Stream]]:
        """All heads of this process's tokens, [n, p w] per slot -> this process's heads of all tokens."""
        parts = [self._repeat_shared_heads(y, slot) for y, slot in zip(outputs, group.shape.slots, strict=True)]
        if self.options.inference:
            own = [y.unflatten(-1, (self.size, -1))[:, self.rank] for y in parts]
            return Done((Saved(tuple(own)), stream))
        sent = [parts] if self.grouping else [[part] for part in parts]
        started = [self.start(EXCHANGE, features_to_rows(each, self.axis)) for each in sent]
        return Pending(lambda: (Saved(tuple(each.wait() for each in started)), stream))

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

    def _send_latents(
        self, group: LinearGroup, latents: Sequence[Tensor], prev: Latents, stream: Stream
    ) -> Pending[tuple[Saved, Stream]]:
        """Sends the latents of a group in which some slots do not send heads."""
        raise NotImplementedError


def _is_exchanged(group: LinearGroup) -> bool:
    return group.shape.name in ("qkv", "o")
