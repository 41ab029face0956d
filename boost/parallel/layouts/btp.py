"""Runtime of `btp` (arXiv 2512.12131). Shapes: `boost.config.layouts.btp`.

Legend: p TP processes, T tokens, D = d/p hidden width held here, R latent width of a group, s the statistic of RMSNorm.

An all-reduce of partial latents forward is the identity backward; one identity forward that is an all-reduce backward
stands directly before B, so that whatever acts on the latents sees complete gradients.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from boost.config.layouts.spec import SUM_FORWARD
from boost.models.group import LinearGroup
from boost.models.interface import Latents, Pending, Saved, Stream
from boost.models.linear import linear
from boost.parallel import collectives
from boost.parallel.collectives import InFlight
from boost.parallel.layouts.base import BaseLayout
from boost.parallel.lookup import lookup
from boost.parallel.loss import cross_entropy
from boost.parallel.norms import SumWithStatistic, inverse_rms, project, project_and_measure, scale, sum_of_squares


class BTP(BaseLayout):
    """Hidden-sharded residual, all-reduces of width r."""

    def embed(self, tokens_T: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
        """[T] -> [T, D]: each process looks up its own columns. No collective."""
        return lookup(tokens_T, table, dtype)

    def in_proj_comm(self, stream: Stream, gamma: Tensor, group: LinearGroup) -> Pending[tuple[Saved, Stream]]:
        """A norm(x), summed over processes: latents, and under the online norm the statistic by which to scale them."""
        start = self._start_online if self.parallel.norm == "online" else self._start_sync
        started = start(stream.x, gamma, group)
        prev, rest = group.take_latents(stream, self.grouping)
        return Pending(lambda: (Saved(tuple(x for each in started for x in each.wait()), prev), rest))

    def in_proj_local(self, saved: Saved, group: LinearGroup) -> tuple[Sequence[Tensor], Latents]:
        """act, then B of this process's heads or channels."""
        latents: Sequence[Tensor] = saved.tensors
        if self.parallel.norm == "online":
            u_TR, s_T, *others = saved.tensors
            c_T1 = self._inverse_rms(s_T)
            latents = [scale(u, c_T1) for u in (u_TR, *others)]
        h, new = group.activate(latents, saved.prev_latents)
        return group.up_proj([self.before_up_proj(h_TR) for h_TR in h]), new

    def out_proj_local(self, hidden: Tensor, group: LinearGroup) -> Tensor:
        """A of this process's heads or channels, a term of a sum."""
        return linear(hidden, group.A)

    def out_proj_comm(self, stream: Stream, partial: Tensor, group: LinearGroup) -> Pending[Stream]:
        """The sum over processes, then act and B's rows of the residual held here."""
        return self.finish_out_proj(stream, self.start(SUM_FORWARD, partial), group)

    def before_up_proj(self, h_TR: Tensor) -> Tensor:
        """Identity forward, all-reduce backward."""
        return collectives.sum_backward(h_TR, self.axis)

    def loss(self, x: Tensor, gamma: Tensor, head: Tensor, targets_T: Tensor) -> Tensor:
        """All-gather of the residual once (reduce-scatter backward), then this process's part of the vocabulary."""
        whole = collectives.rows_to_features(collectives.gather(x, self.axis), self.axis)
        return cross_entropy(self.norm(whole, gamma), head.to(x.dtype), targets_T, self.axis)

    def logits(self, x: Tensor, gamma: Tensor, head: Tensor, tokens_N: Tensor) -> Tensor:
        whole = collectives.rows_to_features(collectives.all_gather(x[tokens_N], self.axis), self.axis)
        return self.gathered_logits(self.norm(whole, gamma), head)

    def _start_online(self, x_TD: Tensor, gamma_D: Tensor, group: LinearGroup) -> list["SumWithStatistic | _OfOne"]:
        """The statistic travels with the (first) partial latents; the norm is applied after A, to T x R numbers."""
        first, *others = group.down_weights(group.A, self.grouping)
        both = SumWithStatistic(*project_and_measure(x_TD, first, gamma_D), self.axis)
        rest = [self.start(SUM_FORWARD, project(x_TD, a_RD, gamma_D)) for a_RD in others]
        return [both, *(_OfOne(each) for each in rest)]

    def _start_sync(self, x_TD: Tensor, gamma_D: Tensor, group: LinearGroup) -> list["SumWithStatistic | _OfOne"]:
        """The statistic has an all-reduce of its own, forward and backward; the norm is applied to x."""
        s_T = collectives.sum_both(sum_of_squares(x_TD), self.axis)

        def down(x_TD: Tensor, s_T: Tensor) -> list[Tensor]:
            normed_TD = scale(x_TD, self._inverse_rms(s_T))
            weights = group.down_weights((group.A * gamma_D).to(x_TD.dtype), self.grouping)
            return [linear(normed_TD, a_RD) for a_RD in weights]

        return [_OfOne(self.start(SUM_FORWARD, u_TR)) for u_TR in self.policy.local(down, x_TD, s_T)]

    def _inverse_rms(self, s_T: Tensor) -> Tensor:
        return inverse_rms(s_T, self.model.dim, self.model.norm_eps)


class _OfOne:
    """A collective of one tensor, as one of several."""

    def __init__(self, started: InFlight) -> None:
        self._started = started

    def wait(self) -> tuple[Tensor, ...]:
        return (self._started.wait(),)
