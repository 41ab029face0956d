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
from boost.models.interface import Latents, Runner
from boost.parallel import collectives
from boost.parallel.layouts.residual import Replicated


class Megatron(Replicated):
    """Replicated residual, all-reduces of width d."""

    name = "megatron"

    def enter(
        self, x: Tensor, gamma: Tensor, group: Group, carried: Latents, local: Runner
    ) -> tuple[Sequence[Tensor], Latents]:
        """norm(x); once if its gradients may meet in one collective, else once a slot."""
        normed_TD = self.norm(x, gamma)
        return [
            collectives.sum_backward(normed_TD, self.axis) for _ in group.shape.slots[: 1 if self.grouping else None]
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
        """The sum over processes."""
        return collectives.sum_forward(closed, self.axis), carried
