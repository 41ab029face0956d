"""Runtime of `vanilla`, the low-rank baseline. Shapes: `boost.config.layouts.vanilla`.

Legend: p TP processes, T tokens, R = r/p a slot's latent width on this process, O a slot's output width.

The published form computes attention and the gated product for all heads and channels on every process. The strong
form, which is the baseline for speedups, shards them. The two forms send the same number of bytes. Grouping merges the
collectives of linears that share an input.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from boost.config.layouts.spec import GATHER, SCATTER_SUM, SUM_BACKWARD, SUM_BOTH, SUM_FORWARD
from boost.layouts.runtime import Replicated
from boost.models.group import Latents, LinearGroup, Outputs
from boost.models.interface import Arrived, Flow
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
            copies = self.start(SUM_BACKWARD, self.copies(self.norm(flow.x, gamma), group))
            yield
            u_TR = group.down(copies.wait())
        else:
            u_TR = group.policy.local(self._norm_and_down, flow.x, gamma, group)
        outputs = self._up(flow, u_TR, group)
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
        sent = [torch.cat(tuple(shares), dim=-1)] if self.grouping else shares
        sums = [self.start(SCATTER_SUM, part.flatten(0, 1)) for part in sent]
        yield
        arrived = [part.wait() for part in sums]
        flow.arrived = arrived[0].split([x.shape[-1] for x in shares], dim=-1) if self.grouping else tuple(arrived)

    def _norm_and_down(self, x: Tensor, gamma: Tensor, group: LinearGroup) -> Tensor:
        """Segment: this process's rows of A norm(x)."""
        return group.down(self.start(SUM_BACKWARD, self.copies(self.norm(x, gamma), group)).wait())

    def up(self, arrived: Arrived, group: LinearGroup) -> Outputs:
        """A no-op: the collective already followed B."""
        return arrived, ()

    def down(self, hidden: Tensor, group: LinearGroup) -> Tensor:
        """This process's rows of A if it has all heads or channels; a no-op if a collective precedes them."""
        if self.num_shards > 1 or self.splits:
            return hidden
        return group.down(collectives.run(SUM_BACKWARD, hidden, self.axis))

    def leave(self, flow: Flow, partial: Tensor, group: LinearGroup) -> Iterator[None]:
        """All heads or channels, through this process's rows of A and columns of B, summed over processes."""
        if self.num_shards > 1:
            parts = self.start(GATHER, partial)
            yield
            whole = collectives.rows_to_features(parts.wait(), self.axis)
            partial = group.policy.local(group.down, whole)
        elif self.splits:
            copy = self.start(SUM_BACKWARD, partial)
            yield
            partial = group.down(copy.wait())
        (update,) = self._up(flow, partial, group)
        summed = self.start(SUM_FORWARD, update)
        yield
        flow.add(summed.wait(), group)

    def _up(self, flow: Flow, u_TR: Tensor, group: LinearGroup) -> Sequence[Tensor]:
        """act and this process's columns of B. Mathematics that mixes the elements of latents needs all latents of the previous
        block, and its sums are over each whole latent."""
        if not group.mixes:
            outputs, kept = group.up_runner(group.up, u_TR)
        else:
            prev_TR = flow.take() if group.takes_prev else None
            if prev_TR is not None and group.shape.kind.mixes_elements:
                prev_TR = collectives.run(GATHER, prev_TR, self.axis)
            mixed_TR, *own_sums = group.policy.local(self._mix, group, prev_TR, u_TR)
            sums = [collectives.run(SUM_BOTH, part, self.axis) for part in own_sums]
            outputs, kept = group.policy.local(self._normalize_and_project, group, mixed_TR, *sums)
        flow.latents += kept
        return outputs

    def _mix(self, group: LinearGroup, prev_TR: Tensor | None, u_TR: Any) -> tuple[Tensor, ...]:
        """Segment: u mixed, and its sums if there are any. It needs this process's shard of each of the previous block's latents
        or, if their elements are mixed, each one whole."""
        mixer, kind = group.mixer, group.shape.kind
        assert mixer is not None
        prev = () if prev_TR is None else prev_TR.split(mixer.prev_widths, dim=-1)
        if kind.mixes_elements:
            prev = tuple(collectives.rows_to_features(part, self.axis) for part in prev)
        u_TR = torch.cat(u_TR, dim=-1) if isinstance(u_TR, tuple) else u_TR
        mixed_TR = group.math.mix(u_TR, prev, mixer).to(u_TR.dtype)
        return (mixed_TR, group.math.sums(mixed_TR, mixer)) if kind.sums else (mixed_TR,)

    def _normalize_and_project(
        self, group: LinearGroup, mixed_TR: Tensor, sums: Tensor | None = None
    ) -> tuple[Sequence[Tensor], Latents]:
        """Segment: what follows, act and B, given the sums of whole latents."""
        assert group.mixer is not None
        h_TR, kept = group.activate(group.math.normalize(mixed_TR, sums, group.mixer).to(mixed_TR.dtype), is_mixed=True)
        return group.project(h_TR), kept
