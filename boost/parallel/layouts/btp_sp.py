"""Runtime of `btp-sp`. Shapes: `boost.config.layouts.btp_sp`.

The switch from "some tokens, whole width" to "all tokens, some heads" happens at the bottleneck, so norms and everything that
acts on the latents are local to a token. The gradients of norms and replicated factors are partial sums over tokens, reduced
once per optimizer step.
"""

from collections.abc import Sequence

from torch import Tensor

from boost.models.group import LinearGroup
from boost.models.interface import Latents, Pending, Saved, Stream
from boost.models.linear import linear
from boost.parallel.layouts.base import TokenSharded


class BTPSP(TokenSharded):
    """Token-sharded residual stream, all-gathers and reduce-scatters of width r."""

    def in_proj_comm(self, stream: Stream, gamma: Tensor, group: LinearGroup) -> Pending[tuple[Saved, Stream]]:
        """act(A norm(x)) of this process's tokens, all-gathered; with sharded latents, A norm(x), which is gathered after it
        has been saved.

        Besides the gathered latents, a block saves its own tokens' latents before act: act is not invertible, and recomputing
        it after the all-gather would be p times the work.
        """

        def down(x: Tensor) -> list[Tensor]:
            return group.down_proj(self.norm(x, gamma), self.grouping)

        latents = self.policy.local(down, stream.x)
        prev, stream = group.take_latents(stream, self.grouping)
        if self.policy.sharded_latents:
            return Pending(lambda: (Saved(tuple(latents), prev), stream))
        if group.latent_gate is None:
            h, new = group.activate(latents)
        else:
            h, new = self.policy.local(lambda prev, *u: group.activate(u, prev), prev, *latents)
        stream = stream.put(new)
        gathered = [self.start(self.to_shards, h_TR) for h_TR in h]
        return Pending(lambda: (Saved(tuple(each.wait() for each in gathered)), stream))

    def in_proj_local(self, saved: Saved, group: LinearGroup) -> tuple[Sequence[Tensor], Latents]:
        """B for this process's heads or channels."""
        if not self.policy.sharded_latents:
            return (group.project if self.has_hand_written_nodes else group.up_proj)(saved.tensors), ()
        h, new = group.activate(saved.tensors, saved.prev_latents)
        return group.up_proj([self.start(self.to_shards, h_TR).wait() for h_TR in h]), new

    def out_proj_local(self, hidden: Tensor, group: LinearGroup) -> Tensor:
        """A for this process's heads or channels: a partial sum."""
        return linear(hidden, group.A)

    def out_proj_comm(self, stream: Stream, partial: Tensor, group: LinearGroup) -> Pending[Stream]:
        """The sum, scattered to this process's tokens, then act and the whole B."""
        return self.finish_out_proj(stream, self.start(self.from_shards, partial), group)
