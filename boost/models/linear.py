"""The one place through which every GEMM of the model goes: other precisions and deferred weight gradients belong here."""

import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Differentiable x W^T (+ b), [..., I] x [O, I] -> [..., O], in x's dtype: master weights are cast where they are used."""
    if bias is not None:
        bias = bias.to(x.dtype)
    return F.linear(x, weight.to(x.dtype), bias)


def gemm(a: Tensor, b: Tensor) -> Tensor:
    """a b, [m, k] x [k, n], inside a hand-written forward or backward pass; both of one dtype."""
    return a @ b
