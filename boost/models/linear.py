"""Every GEMM of the model goes through this file. Other precisions and deferred weight gradients belong here."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Differentiable x W^T (+ b), [..., I] x [O, I] -> [..., O], in x's dtype: master weights are cast here."""
    if bias is not None:
        bias = bias.to(x.dtype)
    return F.linear(x, weight.to(x.dtype), bias)


def gemm(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a b, [m, k] x [k, n], for hand-written forward and backward passes; both of one dtype. `out`: the output tensor, which
    may be columns of a wider one."""
    return a @ b if out is None else torch.mm(a, b, out=out)


def gemms(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Products of pairs [m, k], [k, n], side by side: [m, sum of n]."""
    if len(pairs) == 1 or torch.compiler.is_compiling():  # compiled code writes the parts of a cat in place
        products = [gemm(a, b) for a, b in pairs]
        return products[0] if len(products) == 1 else torch.cat(products, dim=-1)
    (a, _), *_ = pairs
    widths = [b.shape[1] for _, b in pairs]
    made = a.new_empty(a.shape[0], sum(widths))
    for (a, b), part in zip(pairs, made.split(widths, dim=-1), strict=True):
        gemm(a, b, out=part)
    return made
