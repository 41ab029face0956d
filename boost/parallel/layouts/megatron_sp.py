"""`megatron-sp`: `megatron` with a token-sharded residual stream ("sequence parallelism", arXiv 2205.05198).

Legend: p TP processes, T tokens, d hidden width, O outputs held here.

    residual x [T/p, d]; weights cut like `megatron`
    forward a block:   AG(d) RS(d) AG(d) RS(d)
    backward:          AG(d) RS(d) AG(d) RS(d), and the norms' gradients once per optimizer step
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from boost.models.group import Group
from boost.models.interface import Latents, Layout, Runner
from boost.parallel import collectives
from boost.parallel.layouts.megatron import Megatron
from boost.parallel.layouts.residual import TokenSharded


class MegatronSP(TokenSharded):
    """Token-sharded residual, all-gathers and reduce-scatters of width d."""

    name = "megatron-sp"

    @property
    def for_inference(self) -> Layout:
        return Megatron(self.model, self.parallel, self.axis)

    def enter(
        self, x: Tensor, gamma: Tensor, group: Group, carried: Latents, local: Runner
    ) -> tuple[Sequence[Tensor], Latents]:
        """norm(x) of all tokens; once if its gradients may meet in one collective, else once a slot."""
        normed_TD = self.norm(x, gamma)
        return [
            collectives.gather(normed_TD, self.axis) for _ in group.shape.slots[: 1 if self.grouping else None]
        ], carried

    def open(self, kept: Sequence[Tensor], group: Group, carried: Latents) -> tuple[Sequence[Tensor], Latents]:
        """Columns of W for this process's heads or channels."""
        if self.grouping:
            return group.dense(kept[0], True), carried
        weights = group.outer_weights(kept[0].dtype)
        return [F.linear(x_TD, w_OD) for x_TD, w_OD in zip(kept, weights, strict=True)], carried

    def close(self, a: Tensor, group: Group) -> Tensor:
        """Rows of W, a term of a sum."""
        (update,) = group.dense(a, True)
        return update

    def leave(self, closed: Tensor, group: Group, carried: Latents, local: Runner) -> tuple[Tensor, Latents]:
        """The sum over processes, onto this process's tokens."""
        return collectives.scatter_sum(closed, self.axis), carried
