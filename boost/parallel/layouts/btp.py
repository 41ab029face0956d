"""Runtime of `btp` (arXiv 2512.12131). Shapes: `boost.config.layouts.btp`.

Legend: p TP processes, T tokens, D = d/p hidden width on this process, R latent width of a group, s the statistic of RMSNorm.

One pair of autograd nodes sums latents over processes in both passes: partial latents forward, their gradients backward. So
everything that acts on latents sees partial gradients, and those of its parameters are reduced once per optimizer step.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from boost.config.layouts.spec import GATHER, SUM_BOTH
from boost.models.group import LinearGroup
from boost.models.interface import Latents, Pending, Saved, Stream
from boost.models.kernels import inverse_rms
from boost.models.linear import StartCollective, linear, lookup
from boost.parallel import collectives
from boost.parallel.collectives import InFlight
from boost.parallel.layouts.base import BaseLayout
from boost.parallel.norms import OnlineSum, project, project_and_measure, scale, sum_of_squares


class BTP(BaseLayout):
    """Hidden-sharded residual stream, all-reduces of width r."""

    def embed(self, tokens_T: Tensor, table: Tensor, dtype: torch.dtype) -> Pending[Tensor]:
        """[T] -> [T, D]: each process looks up its own columns. No collective."""
        return Pending(lambda: lookup(tokens_T, table, dtype))

    def in_proj_comm(self, stream: Stream, gamma: Tensor, group: LinearGroup) -> Pending[tuple[Saved, Stream]]:
        """A norm(x), summed over processes: latents and, with the online norm, the statistic that scales them."""
        prev, rest = group.take_latents(stream, self.grouping)
        if self.parallel.norm == "sync":
            return self._start_sync(stream.x, gamma, group, prev, rest)
        # The statistic is sent with the (first) partial latents. The norm is applied after A, to T x R elements.
        first, *others = group.down_weights(group.A, self.grouping)
        measured = project_and_measure(stream.x, first, gamma, self.axis)
        rest_of_latents = [project(stream.x, a_RD, gamma) for a_RD in others]
        backward_started = self.keeps_latents_only(group)
        started = OnlineSum(measured, rest_of_latents, self.axis, self.model.dim, self.model.norm_eps, backward_started)
        return Pending(lambda: (Saved(started.wait(), prev), rest))

    def in_proj_local(self, saved: Saved, group: LinearGroup) -> tuple[Sequence[Tensor], Latents]:
        """act, then B for this process's heads or channels."""
        latents, c_T1 = saved.tensors, None
        if self.parallel.norm == "online":
            u_TR, s_T, *others = saved.tensors
            latents, c_T1 = (u_TR, *others), self._inverse_rms(s_T)
        if self.keeps_latents_only(group):
            return group.scale_act_and_project(latents, c_T1, self._grad_sum_starter(group)), ()
        scaled = latents if c_T1 is None else [scale(u, c_T1) for u in latents]
        return group.activate_and_project(scaled, saved.prev_latents)

    def out_proj_local(self, hidden: Tensor, group: LinearGroup) -> Tensor:
        """A for this process's heads or channels: a partial sum."""
        return linear(hidden, group.A)

    def out_proj_comm(self, stream: Stream, partial: Tensor, group: LinearGroup) -> Pending[Stream]:
        """The sum over processes, then act and B for this process's columns of the residual stream."""
        started = self.start(SUM_BOTH, partial, backward_started=self.keeps_latents_only(group))
        return self.finish_out_proj(stream, started, group, self._grad_sum_starter(group))

    def head_input(self, x: Tensor, gamma: Tensor) -> Pending[Tensor]:
        """One all-gather of the residual stream (reduce-scatter backward), then the final norm of whole rows."""
        shards = self.start(GATHER, x)
        return Pending(lambda: self.norm(collectives.rows_to_features(shards.wait(), self.axis), gamma))

    def logits(self, x: Tensor, gamma: Tensor, head: Tensor, tokens_N: Tensor) -> Tensor:
        whole = collectives.rows_to_features(collectives.all_gather(x[tokens_N], self.axis), self.axis)
        return self.gathered_logits(self.norm(whole, gamma), head)

    def _start_sync(
        self, x_TD: Tensor, gamma_D: Tensor, group: LinearGroup, prev: Latents, rest: Stream
    ) -> Pending[tuple[Saved, Stream]]:
        """The statistic has its own all-reduce, forward and backward, and the norm is applied to x."""
        statistic = self.start(SUM_BOTH, sum_of_squares(x_TD))

        def down(x_TD: Tensor, s_T: Tensor) -> list[Tensor]:
            normed_TD = scale(x_TD, self._inverse_rms(s_T))
            weights = group.down_weights((group.A * gamma_D).to(x_TD.dtype), self.grouping)
            return [linear(normed_TD, a_RD) for a_RD in weights]

        def latents() -> list[InFlight]:
            found = self.policy.local(down, x_TD, statistic.wait())
            return [self.start(SUM_BOTH, u_TR, backward_started=self.keeps_latents_only(group)) for u_TR in found]

        # Lambdas, because torch.compile does not trace a nested function whose annotation contains a tuple.
        return Pending(latents).then(
            lambda sums: Pending(lambda: (Saved(tuple(each.wait() for each in sums), prev), rest))
        )

    def _grad_sum_starter(self, group: LinearGroup) -> StartCollective | None:
        """Starts the sum of the latents' gradient before the weight gradients are computed. None if gradients from other blocks
        must be added first."""
        return self._start_grad_sum if self.keeps_latents_only(group) else None

    def _start_grad_sum(self, du_TR: Tensor) -> Tensor:
        return collectives.begin_all_reduce(du_TR, self.axis)

    def _inverse_rms(self, s_T: Tensor) -> Tensor:
        return inverse_rms(s_T, self.model.dim, self.model.norm_eps)
