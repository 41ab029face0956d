"""`single`: every weight on one process. Has no collectives and no copies. Every other layout becomes `single` if p = 1.

Legend: T tokens, D hidden width, V vocabulary.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from boost.layouts.runtime import BaseLayout
from boost.models.group import LinearGroup
from boost.models.interface import NOTHING_IN_FLIGHT, Flow
from boost.models.kernels import lookup


class Single(BaseLayout):
    """The whole model on one process."""

    def embed(self, flow: Flow, table: Tensor, dtype: torch.dtype) -> Iterable[None]:
        flow.x = lookup(flow.x, table, dtype)
        return NOTHING_IN_FLIGHT

    def enter(self, flow: Flow, gamma: Tensor, group: LinearGroup) -> Iterable[None]:
        """norm(x), then A if the linears are low-rank."""
        u_TR = group.policy.local(self.norm_and_down, flow.x, gamma, group)
        flow.arrived = u_TR, flow.take() if group.takes_prev else None
        return NOTHING_IN_FLIGHT

    leave = BaseLayout.update

    def head_input(self, flow: Flow, gamma: Tensor) -> Iterable[None]:
        flow.x = self.norm(flow.x, gamma)
        return NOTHING_IN_FLIGHT

    def logits(self, x: Tensor, gamma: Tensor, head: Tensor, tokens_N: Tensor) -> Tensor:
        return self.all_logits(self.norm(x[tokens_N], gamma), head)
