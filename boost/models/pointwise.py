"""Differentiable element-wise functions of the model. Each saves only its inputs and runs as one kernel in either pass
(`boost.models.kernels`)."""

from typing import Any

import torch
from torch import Tensor

from boost.models import kernels


class _GatedProduct(torch.autograd.Function):
    """forward: gate, up [T, O] -> y = silu(gate) up; dgrad: dgate = dy up silu'(gate), dup = dy silu(gate). No collective.

    Saves gate and up; the backward pass recomputes silu(gate).
    """

    @staticmethod
    def forward(ctx: Any, gate_TO: Tensor, up_TO: Tensor) -> Tensor:
        ctx.save_for_backward(gate_TO, up_TO)
        return kernels.gated(gate_TO, up_TO)

    @staticmethod
    def backward(ctx: Any, dy_TO: Tensor) -> tuple[Tensor, Tensor]:
        return kernels.gated_backward(dy_TO, *ctx.saved_tensors)


class _Rotary(torch.autograd.Function):
    """forward: x [B, S, H, E], angles [S, E] -> x rotated; dgrad: dy rotated by the opposite angles. No collective.

    Saves only the angles, which all blocks share.
    """

    @staticmethod
    def forward(ctx: Any, x_BSHE: Tensor, cos_SE: Tensor, sin_SE: Tensor) -> Tensor:
        ctx.save_for_backward(cos_SE, sin_SE)
        return kernels.rotated(x_BSHE, cos_SE, sin_SE)

    @staticmethod
    def backward(ctx: Any, dy_BSHE: Tensor) -> tuple[Tensor, None, None]:
        return kernels.rotated_backward(dy_BSHE, *ctx.saved_tensors), None, None


def gated_product(gate_TO: Tensor, up_TO: Tensor, silu: bool) -> Tensor:
    """Differentiable silu(gate) up (SwiGLU, arXiv 2002.05202), or gate up."""
    if not silu:
        return gate_TO * up_TO
    if not torch.is_grad_enabled():
        y_TO: Tensor = kernels.gated(gate_TO, up_TO)
        return y_TO
    return _GatedProduct.apply(gate_TO, up_TO)


def rotary(x_BSHE: Tensor, cos_SE: Tensor, sin_SE: Tensor) -> Tensor:
    """Differentiable rotary embedding (arXiv 2104.09864) in the rotate-half form, which pairs the two halves of a head."""
    if not torch.is_grad_enabled():
        y_BSHE: Tensor = kernels.rotated(x_BSHE, cos_SE, sin_SE)
        return y_BSHE
    return _Rotary.apply(x_BSHE, cos_SE, sin_SE)
