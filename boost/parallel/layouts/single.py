"""`single`: every weight in this process. No collective and no copy: what every other layout with p = 1 becomes.

Legend: T tokens, D hidden width, V vocabulary.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from boost.models.group import Group
from boost.models.interface import Latents, Layout, Runner
from boost.parallel.layouts.residual import Base
from boost.parallel.lookup import lookup
from boost.parallel.loss import cross_entropy


class Single(Base):
    """The whole function in one process."""

    name = "single"

    def embed(self, tokens_T: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
        return lookup(tokens_T, table, dtype)

    @property
    def with_sharded_latents(self) -> Layout:
        return self  # one process's part is all of them

    def enter(
        self, x: Tensor, gamma: Tensor, group: Group, carried: Latents, local: Runner
    ) -> tuple[Sequence[Tensor], Latents]:
        if not group.low_rank:
            return [self.norm(x, gamma)], carried
        return local(lambda x: group.down(self.norm(x, gamma), self.grouping), x), carried

    def open(self, kept: Sequence[Tensor], group: Group, carried: Latents) -> tuple[Sequence[Tensor], Latents]:
        return group.bend_up(kept, carried) if group.low_rank else (group.dense(kept[0], self.grouping), carried)

    def close(self, a: Tensor, group: Group) -> Tensor:
        (closed,) = group.down(a, True) if group.low_rank else group.dense(a, True)
        return closed

    def leave(self, closed: Tensor, group: Group, carried: Latents, local: Runner) -> tuple[Tensor, Latents]:
        if not group.low_rank:
            return closed, carried
        (update,), carried = local(lambda u, *waiting: group.bend_up([u], waiting), closed, *carried)
        return update, carried

    def loss(self, x: Tensor, gamma: Tensor, head: Tensor, targets_T: Tensor) -> Tensor:
        return cross_entropy(self.norm(x, gamma), head.to(x.dtype), targets_T, self.axis)

    def logits(self, x: Tensor, gamma: Tensor, head: Tensor, tokens_N: Tensor) -> Tensor:
        return F.linear(self.norm(x[tokens_N], gamma), head.to(x.dtype))
