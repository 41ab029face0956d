"""Runtimes of `megatron` and, with a token-sharded residual stream, of `megatron-sp`. Shapes: `boost.config.layouts.megatron`.

Legend: T tokens, d hidden width, O outputs on this process.
"""

from collections.abc import Sequence

from torch import Tensor

from boost.models.group import LinearGroup
from boost.models.interface import Latents, Pending, Saved, Stream
from boost.parallel.layouts.base import Replicated, TokenSharded


class Megatron(Replicated):
    """Columns of W, then rows of W. The kind of residual stream determines the collectives before and after.

    In at least one of the two passes, two collectives follow each other between two groups, with only a norm in between. To
    hide both, rows of W are a separate step and the second half trails by one step, so it has work during either collective.
    """

    lag = 1

    def in_proj_comm(self, stream: Stream, gamma: Tensor, group: LinearGroup) -> Pending[tuple[Saved, Stream]]:
        """norm(x) of all tokens: one collective if the slots' gradients can share one, otherwise one per slot."""
        normed = self.norm(stream.x, gamma)
        copies = [self.start(self.to_shards, normed) for _ in group.shape.slots[: 1 if self.grouping else None]]
        return Pending(lambda: (Saved(tuple(copy.wait() for copy in copies)), stream))

    def in_proj_local(self, saved: Saved, group: LinearGroup) -> tuple[Sequence[Tensor], Latents]:
        """Columns of W for this process's heads or channels."""
        return group.dense(saved, self.grouping), ()

    def out_proj_local(self, hidden: Tensor, group: LinearGroup) -> Tensor:
        """Rows of W: a partial sum. With overlapped halves, deferred to `out_proj_comm`."""
        return hidden if self.options.split else group.dense_out(hidden)

    def out_proj_comm(self, stream: Stream, partial: Tensor, group: LinearGroup) -> Pending[Stream]:
        """The sum over processes."""
        if not self.options.split:
            update = self.start(self.from_shards, partial)
            return Pending(lambda: stream.add(update.wait()))
        return Pending(lambda: self.start(self.from_shards, group.dense_out(partial))).then(
            lambda update: Pending(lambda: stream.add(update.wait()))
        )


class MegatronSP(TokenSharded, Megatron):
    """All-gathers before a group's first linears, reduce-scatters after its last."""
