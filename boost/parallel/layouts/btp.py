"""`btp`: bottleneck-aware tensor parallelism (arXiv 2512.12131). Cut along the wide dimension, synchronise at the bottleneck.

Legend: p TP processes, T tokens, D = d/p hidden width held here, R latent width of a group, s the statistic of RMSNorm.

    residual x [T, D]; A [R, d_in/p], B [d_out/p, r], gamma [D]; embedding [V, D], head [V/p, d], final gamma [d]
    forward a block, online and grouped:  AR(3r + s)  AR(r)  AR(2r + s)  AR(r)
    backward:                             AR(3r)      AR(r)  AR(2r)      AR(r)

An all-reduce of partial latents forward is the identity backward; one identity forward that is an all-reduce backward
stands directly before B, so that whatever acts on the latents sees complete gradients.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from boost.models.group import Group
from boost.models.interface import Latents, Runner
from boost.parallel import collectives
from boost.parallel.layouts.residual import Base
from boost.parallel.lookup import lookup
from boost.parallel.loss import cross_entropy
from boost.parallel.norms import inverse_rms, project, project_and_measure, scale, sum_of_squares, sum_with_statistic


class BTP(Base):
    """Hidden-sharded residual, all-reduces of width r."""

    name = "btp"

    def residual_shape(self, tokens: int) -> tuple[int, int]:
        return tokens, self.model.dim // self.size

    def embed(self, tokens_T: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
        """[T] -> [T, D]: each process looks up its own columns. No collective."""
        return lookup(tokens_T, table, dtype)

    def enter(
        self, x: Tensor, gamma: Tensor, group: Group, carried: Latents, local: Runner
    ) -> tuple[Sequence[Tensor], Latents]:
        """A norm(x), summed over processes: latents, and under the online norm the statistic by which to scale them."""
        if self.parallel.norm == "online":
            return self._online(x, gamma, group.down_weights(group.A, self.grouping)), carried
        return self._sync(x, gamma, group, local), carried

    def open(self, kept: Sequence[Tensor], group: Group, carried: Latents) -> tuple[Sequence[Tensor], Latents]:
        """act, then B of this process's heads or channels."""
        if self.parallel.norm == "online":
            *latents, s_T = kept
            c_T1 = self._inverse_rms(s_T)
            kept = [scale(u, c_T1) for u in latents]
        return self._up(kept, group, carried)

    def close(self, a: Tensor, group: Group) -> Tensor:
        """A of this process's heads or channels, a term of a sum."""
        return F.linear(a, group.A.to(a.dtype))

    def leave(self, closed: Tensor, group: Group, carried: Latents, local: Runner) -> tuple[Tensor, Latents]:
        """The sum over processes, then act and B's rows of the residual held here."""
        u_TR = collectives.sum_forward(closed, self.axis)
        (update,), carried = local(lambda u, *waiting: self._up([u], group, waiting), u_TR, *carried)
        return update, carried

    def loss(self, x: Tensor, gamma: Tensor, head: Tensor, targets_T: Tensor) -> Tensor:
        """All-gather of the residual once (reduce-scatter backward), then this process's part of the vocabulary."""
        whole = collectives.rows_to_features(collectives.gather(x, self.axis), self.axis)
        return cross_entropy(self.norm(whole, gamma), head.to(x.dtype), targets_T, self.axis)

    def logits(self, x: Tensor, gamma: Tensor, head: Tensor, tokens_N: Tensor) -> Tensor:
        whole = collectives.rows_to_features(collectives.all_gather(x[tokens_N], self.axis), self.axis)
        return self.cut_logits(self.norm(whole, gamma), head)

    def _online(self, x_TD: Tensor, gamma_D: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
        """The statistic travels with the (first) partial latents; the norm is applied behind A, to T x R numbers."""
        u_TR, s_T = sum_with_statistic(*project_and_measure(x_TD, weights[0], gamma_D), self.axis)
        others = [collectives.sum_forward(project(x_TD, a_RD, gamma_D), self.axis) for a_RD in weights[1:]]
        return [u_TR, *others, s_T]

    def _sync(self, x_TD: Tensor, gamma_D: Tensor, group: Group, local: Runner) -> list[Tensor]:
        """The statistic has an all-reduce of its own, forward and backward; the norm is applied to x."""
        s_T = collectives.sum_both(sum_of_squares(x_TD), self.axis)

        def down(x_TD: Tensor, s_T: Tensor) -> list[Tensor]:
            normed_TD = scale(x_TD, self._inverse_rms(s_T))
            weights = group.down_weights((group.A * gamma_D).to(x_TD.dtype), self.grouping)
            return [F.linear(normed_TD, a_RD) for a_RD in weights]

        return [collectives.sum_forward(u_TR, self.axis) for u_TR in local(down, x_TD, s_T)]

    def _inverse_rms(self, s_T: Tensor) -> Tensor:
        return inverse_rms(s_T, self.model.dim, self.model.norm_eps)

    def _up(self, latents: Sequence[Tensor], group: Group, carried: Latents) -> tuple[list[Tensor], Latents]:
        bent, carried = group.bend(latents, carried)
        return group.up([collectives.sum_backward(h, self.axis) for h in bent]), carried
