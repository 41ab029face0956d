"""`single`: every weight in this process. No collective and no copy: what every other layout with p = 1 becomes.

Legend: T tokens, D hidden width, V vocabulary.
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from boost.config.schema import ModelConfig, ParallelConfig
from boost.models.group import Group
from boost.models.interface import Cut, Latents
from boost.parallel.loss import cross_entropy
from boost.parallel.mesh import Axis


class Single:
    """The whole function in one process."""

    name = "single"

    def __init__(self, model: ModelConfig, parallel: ParallelConfig, axis: Axis) -> None:
        assert axis.size == 1
        self.rank, self.size, self.axis = axis.rank, axis.size, axis
        self.eps, self.grouping = model.norm_eps, parallel.grouping

    def cut(self, role: str) -> Cut:
        return Cut()

    def embed(self, tokens_T: Tensor, table: Tensor) -> Tensor:
        return F.embedding(tokens_T, table)

    def enter(self, x: Tensor, gamma: Tensor, group: Group, carried: Latents) -> tuple[Sequence[Tensor], Latents]:
        return group(self._norm(x, gamma), carried, self.grouping)

    def leave(self, a: Tensor, group: Group, carried: Latents) -> tuple[Tensor, Latents]:
        (update,), carried = group(a, carried, self.grouping)
        return update, carried

    def loss(self, x: Tensor, gamma: Tensor, head: Tensor, targets_T: Tensor) -> Tensor:
        return cross_entropy(self._norm(x, gamma), head.to(x.dtype), targets_T, self.axis)

    def logits(self, x: Tensor, gamma: Tensor, head: Tensor, tokens_N: Tensor) -> Tensor:
        return F.linear(self._norm(x[tokens_N], gamma), head.to(x.dtype))

    def _norm(self, x: Tensor, gamma: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), gamma.to(x.dtype), self.eps)
