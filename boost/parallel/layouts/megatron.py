"""`megatron`: column -> row tensor parallelism of the dense model (arXiv 1909.08053), the full-rank baseline.

Legend: p TP processes, T tokens, d hidden width, O outputs held here.

    residual x [T, d]; q, k, v, gate, up: W [d_out/p, d]; o, down: W [d, d_in/p]; norms whole
    forward a block:            AR(d) AR(d)
    backward, grouped:          AR(d) AR(d)
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from boost.models.group import Group
from boost.models.interface import Latents
from boost.parallel import collectives
from boost.parallel.layouts.residual import Replicated


class Megatron(Replicated):
    """Replicated residual, all-reduces of width d."""

    name = "megatron"

    def enter(self, x: Tensor, gamma: Tensor, group: Group, carried: Latents) -> tuple[Sequence[Tensor], Latents]:
        """Columns of W for this process's heads or channels; the gradients of all of them meet in one all-reduce."""
        normed_TD = self.norm(x, gamma)
        if self.grouping:
            return group.dense(collectives.sum_backward(normed_TD, self.axis), True), carried
        weights = group.outer_weights(x.dtype)
        return [F.linear(collectives.sum_backward(normed_TD, self.axis), w_OD) for w_OD in weights], carried

    def leave(self, a: Tensor, group: Group, carried: Latents) -> tuple[Tensor, Latents]:
        """Rows of W, summed over processes."""
        (update,) = group.dense(a, True)
        return collectives.sum_forward(update, self.axis), carried
