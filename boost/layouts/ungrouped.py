"""The ablation `parallel.grouping = false`: every slot of a group has its own GEMM and collective. Where a group has one tensor,
such as its latents, an ungrouped one has a tuple with a tensor per slot.
"""

from typing import Any

import torch
from torch import Tensor

from boost.config.layouts.spec import Comm
from boost.models.group import LinearGroup
from boost.models.kernels import UpProject, linear, projected, scale
from boost.parallel import collectives
from boost.parallel.collectives import InFlight


class Ungrouped(LinearGroup):
    """A base class before another class of groups (`BaseLayout.group_class`)."""

    def down(self, x: Any, gamma_I: Tensor | None = None) -> Any:
        inputs = x if isinstance(x, tuple) else (x,) * len(self.shape.slots)
        if not self.low_rank:
            return inputs
        inner = self.inner if gamma_I is None else (self.inner * gamma_I).to(inputs[0].dtype)
        slots = zip(inputs, self.inner_by_slot(inner), strict=True)
        return tuple(self.with_selected(linear(x_TI, a_rI), x_TI, index, gamma_I) for x_TI, (a_rI, index) in slots)

    def up(self, u: Any, prev_TR: Any = None, scale_T1: Any = None, start_grad_sum: Any = None) -> Any:
        if self.is_one_node and torch.is_grad_enabled():
            slots = zip(u, self.slot_acts, self.outer_by_slot(), strict=True)
            return [UpProject.apply(u_Tr, scale_T1, act, start_grad_sum, 1, *b)[0] for u_Tr, act, b in slots], ()
        scaled: Any = u if scale_T1 is None else tuple(scale(u_Tr, scale_T1) for u_Tr in u)
        return super().up(scaled, prev_TR)

    def activate(self, u: Any, prev_TR: Tensor | None = None, is_mixed: bool = False) -> Any:
        if not self.mixes and not self.feeds_next:
            slots = zip(u, self.slot_acts, strict=True)
            return tuple(u_Tr if act is None else act.forward(u_Tr) for u_Tr, act in slots), ()
        # What mixes latents, and the next block, take all slots.
        h_TR, kept = super().activate(torch.cat(u, dim=-1) if isinstance(u, tuple) else u, prev_TR, is_mixed)
        return tuple(h_TR.split(self.up_widths, dim=-1)), kept

    def project(self, h: Any) -> Any:
        return list(map(projected, h, self.outer_by_slot()))


def start_each(comm: Comm, x: Any, **options: Any) -> InFlight:
    """Starts one collective per tensor, for groups that have a tuple of one per slot."""
    if not isinstance(x, tuple):
        return collectives.start(comm, x, **options)
    in_flight = [collectives.start(comm, part, **options) for part in x]
    return InFlight(lambda: tuple(part.wait() for part in in_flight))  # type: ignore[arg-type,return-value]
