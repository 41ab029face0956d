"""Partial gradients: sums over TP ranks of the gradients of replicated parameters, as part of the backward pass."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from boost.models.fused import fused_params
from boost.parallel import collectives
from boost.parallel.mesh import Axis


class PartialGradients:
    """The hooks of a module whose replicated parameters get partial gradients under its layout (norms and outer factors under
    btp-sp, the final norm under btp, ...).

    Each gradient is all-reduced over TP when autograd has computed it, so that a training loop sees complete gradients. Inside
    `deferred` it is kept aside instead, and added to the next one that is summed: once per step is enough.
    """

    def __init__(self, module: nn.Module, axis: Axis) -> None:
        self._axis, self._is_deferred = axis, False
        self._kept: dict[int, Tensor] = {}
        for fused in fused_params(module):
            if fused.placement.partial:
                fused.parameter.register_hook(self._hook(id(fused.parameter)))

    def _hook(self, key: int) -> Any:
        @torch.no_grad()
        def summed(gradient: Tensor) -> Tensor:
            kept = self._kept.pop(key, None)
            gradient = gradient if kept is None else gradient + kept
            if self._is_deferred:
                self._kept[key] = gradient
                return torch.zeros_like(gradient)
            return collectives.all_reduce(gradient, self._axis)

        return summed

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Backward passes in this block do not communicate partial gradients; the first one after it sums all of them."""
        before, self._is_deferred = self._is_deferred, True
        try:
            yield
        finally:
            self._is_deferred = before


def reduce_partial_gradients(module: nn.Module, axis: Axis) -> PartialGradients | None:
    """Registers the hooks on a module that is sharded over several TP ranks; None with one."""
    return PartialGradients(module, axis) if axis.size > 1 else None
