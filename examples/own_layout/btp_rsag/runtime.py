"""The runtime of `btp-rsag`."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from boost.layouts.btp import BTP
from boost.models.group import LinearGroup
from boost.models.interface import Flow
from boost.parallel import collectives
from boost.parallel.mesh import Axis


class _Sum(torch.autograd.Function):
    """forward: [T, R] summed over processes, by a reduce-scatter and an all-gather; dgrad: summed by an all-reduce."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return collectives.all_gather(collectives.reduce_scatter(x, axis), axis)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return collectives.all_reduce(dy, ctx.axis), None


class RSAG(BTP):
    """btp, except for one sum."""

    def leave(self, flow: Flow, partial: Tensor, group: LinearGroup) -> Iterator[None]:
        latents = _Sum.apply(partial, self.axis)
        yield
        self.update(flow, latents, group)
