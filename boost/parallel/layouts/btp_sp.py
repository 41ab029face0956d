"""`btp-sp`: BTP with a token-sharded residual stream. Half of BTP's bytes, in collectives of one phase instead of two.

Legend: p TP processes, T tokens, d hidden width, R latent width of a group.

    residual x [T/p, d]; A of q, k, v, gate, up and B of o, down whole; B of q, k, v, gate, up [d_out/p, r];
    A of o, down [r, d_in/p]; norms whole
    forward a block, grouped:   AG(3r)  RS(r)  AG(2r)  RS(r)
    backward:                   RS(3r)  AG(r)  RS(2r)  AG(r)

The crossing from "some tokens, whole width" to "all tokens, some heads" stands exactly at the bottleneck, so norms and whatever
acts on the latents are local to a token. The gradients of norms and whole factors are sums over tokens: partial on each
process, reduced once per optimizer step.
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from boost.models.group import Group
from boost.models.interface import Latents, Layout
from boost.parallel import collectives
from boost.parallel.layouts.residual import Replicated, TokenSharded


class BTPSP(TokenSharded):
    """Token-sharded residual, all-gathers and reduce-scatters of width r."""

    name = "btp-sp"

    @property
    def for_inference(self) -> Layout:
        return _AnyLength(self.model, self.parallel, self.axis)

    def enter(self, x: Tensor, gamma: Tensor, group: Group, carried: Latents) -> tuple[Sequence[Tensor], Latents]:
        """act(A norm(x)) of this process's tokens, gathered, then B of its heads or channels."""
        normed = self.norm(x, gamma)
        weights = group.down_weights(group.A.to(x.dtype), self.grouping)
        bent, carried = group.bend([F.linear(normed, a) for a in weights], carried)
        return group.up([collectives.gather(h, self.axis) for h in bent]), carried

    def leave(self, a: Tensor, group: Group, carried: Latents) -> tuple[Tensor, Latents]:
        """A of this process's heads or channels, summed onto its tokens, then the whole B."""
        u_TR = collectives.scatter_sum(F.linear(a, group.A.to(a.dtype)), self.axis)
        bent, carried = group.bend([u_TR], carried)
        (update,) = group.up(bent)
        return update, carried


class _AnyLength(Replicated):
    """The same cuts with every token on every process: for one token at a time, and without gradients.

    Two all-reduces of width r a block: what enters needs none, since the factors A before it are whole.
    """

    name = "btp-sp"

    def enter(self, x: Tensor, gamma: Tensor, group: Group, carried: Latents) -> tuple[Sequence[Tensor], Latents]:
        return group(self.norm(x, gamma), carried, self.grouping)

    def leave(self, a: Tensor, group: Group, carried: Latents) -> tuple[Tensor, Latents]:
        u_TR = collectives.all_reduce(F.linear(a, group.A.to(a.dtype)), self.axis)
        bent, carried = group.bend([u_TR], carried)
        (update,) = group.up(bent)
        return update, carried
