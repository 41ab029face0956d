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
from boost.models.interface import Latents, Layout
from boost.parallel import collectives
from boost.parallel.layouts.megatron import Megatron
from boost.parallel.layouts.residual import TokenSharded


class MegatronSP(TokenSharded):
    """Token-sharded residual, all-gathers and reduce-scatters of width d."""

    name = "megatron-sp"

    @property
    def for_inference(self) -> Layout:
        return Megatron(self.model, self.parallel, self.axis)

    def enter(self, x: Tensor, gamma: Tensor, group: Group, carried: Latents) -> tuple[Sequence[Tensor], Latents]:
        """All tokens, columns of W for this process's heads or channels."""
        normed_TD = self.norm(x, gamma)
        if self.grouping:
            return group.dense(collectives.gather(normed_TD, self.axis), True), carried
        weights = group.outer_weights(x.dtype)
        return [F.linear(collectives.gather(normed_TD, self.axis), w_OD) for w_OD in weights], carried

    def leave(self, a: Tensor, group: Group, carried: Latents) -> tuple[Tensor, Latents]:
        """Rows of W, summed over processes onto this process's tokens."""
        (update,) = group.dense(a, True)
        return collectives.scatter_sum(update, self.axis), carried
