"""`single`: every weight in this process. No collective and no copy: what every other layout with p = 1 becomes.

Legend: T tokens, D hidden width, V vocabulary.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from boost.models.group import Group
from boost.models.interface import Latents
from boost.parallel.layouts.residual import Base
from boost.parallel.loss import cross_entropy


class Single(Base):
    """The whole function in one process."""

    name = "single"

    def embed(self, tokens_T: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
        return F.embedding(tokens_T, table).to(dtype)

    def enter(self, x: Tensor, gamma: Tensor, group: Group, carried: Latents) -> tuple[Sequence[Tensor], Latents]:
        return group(self.norm(x, gamma), carried, self.grouping)

    def leave(self, a: Tensor, group: Group, carried: Latents) -> tuple[Tensor, Latents]:
        (update,), carried = group(a, carried, self.grouping)
        return update, carried

    def loss(self, x: Tensor, gamma: Tensor, head: Tensor, targets_T: Tensor) -> Tensor:
        return cross_entropy(self.norm(x, gamma), head.to(x.dtype), targets_T, self.axis)

    def logits(self, x: Tensor, gamma: Tensor, head: Tensor, tokens_N: Tensor) -> Tensor:
        return F.linear(self.norm(x[tokens_N], gamma), head.to(x.dtype))
