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
from boost.models.interface import Latents, Layout, Runner
from boost.parallel import collectives
from boost.parallel.layouts.residual import Replicated, TokenSharded


class BTPSP(TokenSharded):
    """Token-sharded residual, all-gathers and reduce-scatters of width r."""

    name = "btp-sp"

    @property
    def for_inference(self) -> Layout:
        return _AnyLength(self.model, self.parallel, self.axis)

    @property
    def with_sharded_latents(self) -> Layout:
        return _ShardedLatents(self.model, self.parallel, self.axis)

    def latent_shape(self, group: Group, tokens: int) -> tuple[int, int]:
        """Those of this process's tokens."""
        return super().latent_shape(group, tokens // self.size)

    def enter(
        self, x: Tensor, gamma: Tensor, group: Group, carried: Latents, local: Runner
    ) -> tuple[Sequence[Tensor], Latents]:
        """act(A norm(x)) of this process's tokens, gathered.

        Of the latents before act a block keeps its own tokens' too: act cannot be undone, and to redo it behind the
        gathering would be p times the work.
        """
        latents = self._down(x, gamma, group, local)
        if group.crossing is None:
            bent, carried = group.bend(latents, carried)
        else:
            bent, carried = local(lambda waiting, *u: group.bend(u, waiting), carried, *latents)
        return [collectives.gather(h, self.axis) for h in bent], carried

    def open(self, kept: Sequence[Tensor], group: Group, carried: Latents) -> tuple[Sequence[Tensor], Latents]:
        """B of this process's heads or channels."""
        return group.up(kept), carried

    def close(self, a: Tensor, group: Group) -> Tensor:
        """A of this process's heads or channels, a term of a sum."""
        return F.linear(a, group.A.to(a.dtype))

    def leave(self, closed: Tensor, group: Group, carried: Latents, local: Runner) -> tuple[Tensor, Latents]:
        """The sum onto this process's tokens, then act and the whole B."""
        u_TR = collectives.scatter_sum(closed, self.axis)
        (update,), carried = local(lambda u, *waiting: group.bend_up([u], waiting), u_TR, *carried)
        return update, carried

    def _down(self, x: Tensor, gamma: Tensor, group: Group, local: Runner) -> Sequence[Tensor]:
        return local(lambda x: group.down(self.norm(x, gamma), self.grouping), x)


class _ShardedLatents(BTPSP):
    """Gathers behind what is kept: [T/p, R] instead of [T, R], and one more all-gather in the backward pass."""

    def enter(
        self, x: Tensor, gamma: Tensor, group: Group, carried: Latents, local: Runner
    ) -> tuple[Sequence[Tensor], Latents]:
        return self._down(x, gamma, group, local), carried

    def open(self, kept: Sequence[Tensor], group: Group, carried: Latents) -> tuple[Sequence[Tensor], Latents]:
        bent, carried = group.bend(kept, carried)
        return group.up([collectives.gather(h, self.axis) for h in bent]), carried


class _AnyLength(Replicated):
    """The same cuts with every token on every process: for one token at a time, and without gradients.

    Two all-reduces of width r a block: what enters needs none, since the factors A before it are whole.
    """

    name = "btp-sp"

    def enter(
        self, x: Tensor, gamma: Tensor, group: Group, carried: Latents, local: Runner
    ) -> tuple[Sequence[Tensor], Latents]:
        return group.down(self.norm(x, gamma), self.grouping), carried

    def open(self, kept: Sequence[Tensor], group: Group, carried: Latents) -> tuple[Sequence[Tensor], Latents]:
        return group.bend_up(kept, carried)

    def close(self, a: Tensor, group: Group) -> Tensor:
        return F.linear(a, group.A.to(a.dtype))

    def leave(self, closed: Tensor, group: Group, carried: Latents, local: Runner) -> tuple[Tensor, Latents]:
        (update,), carried = group.bend_up([collectives.all_reduce(closed, self.axis)], carried)
        return update, carried
