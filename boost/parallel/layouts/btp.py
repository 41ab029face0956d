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
from boost.models.interface import Latents
from boost.parallel import collectives
from boost.parallel.layouts.residual import Base
from boost.parallel.loss import cross_entropy
from boost.parallel.norms import inverse_rms, project_and_measure, scale, sum_of_squares, sum_with_statistic


class BTP(Base):
    """Hidden-sharded residual, all-reduces of width r."""

    name = "btp"

    def embed(self, tokens_T: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
        """[T] -> [T, D]: each process looks up its own columns. No collective."""
        return F.embedding(tokens_T, table).to(dtype)

    def enter(self, x: Tensor, gamma: Tensor, group: Group, carried: Latents) -> tuple[Sequence[Tensor], Latents]:
        """A norm(x) summed over processes, then B of this process's heads or channels."""
        # gamma scales columns of A instead of rows of x: no second [T, D] to write, keep and read again.
        a_RD = (group.A * gamma).to(x.dtype)
        weights = group.down_weights(a_RD, self.grouping)
        latents = self._online(x, weights) if self.parallel.norm == "online" else self._sync(x, weights)
        return self._up(latents, group, carried)

    def leave(self, a: Tensor, group: Group, carried: Latents) -> tuple[Tensor, Latents]:
        """A of this process's heads or channels, summed over processes, then B's rows of the residual held here."""
        u_TR = collectives.sum_forward(F.linear(a, group.A.to(a.dtype)), self.axis)
        (update,), carried = self._up([u_TR], group, carried)
        return update, carried

    def loss(self, x: Tensor, gamma: Tensor, head: Tensor, targets_T: Tensor) -> Tensor:
        """All-gather of the residual once (reduce-scatter backward), then this process's part of the vocabulary."""
        whole = collectives.rows_to_features(collectives.gather(x, self.axis), self.axis)
        return cross_entropy(self.norm(whole, gamma), head.to(x.dtype), targets_T, self.axis)

    def logits(self, x: Tensor, gamma: Tensor, head: Tensor, tokens_N: Tensor) -> Tensor:
        whole = collectives.rows_to_features(collectives.all_gather(x[tokens_N], self.axis), self.axis)
        return self.cut_logits(self.norm(whole, gamma), head)

    def _online(self, x_TD: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
        """The statistic travels with the (first) partial latents; the norm is applied behind A, to T x R numbers."""
        u_TR, s_T = sum_with_statistic(*project_and_measure(x_TD, weights[0]), self.axis)
        others = [collectives.sum_forward(F.linear(x_TD, a), self.axis) for a in weights[1:]]
        c_T1 = inverse_rms(s_T, self.model.dim, self.model.norm_eps)
        return [scale(u, c_T1) for u in (u_TR, *others)]

    def _sync(self, x_TD: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
        """The statistic has an all-reduce of its own, forward and backward; the norm is applied to x."""
        s_T = collectives.sum_both(sum_of_squares(x_TD), self.axis)
        normed_TD = scale(x_TD, inverse_rms(s_T, self.model.dim, self.model.norm_eps))
        return [collectives.sum_forward(F.linear(normed_TD, a), self.axis) for a in weights]

    def _up(self, latents: Sequence[Tensor], group: Group, carried: Latents) -> tuple[list[Tensor], Latents]:
        bent, carried = group.bend(latents, carried)
        return group.up([collectives.sum_backward(h, self.axis) for h in bent]), carried
