"""Every GEMM of the model goes through this file. Other precisions and deferred weight gradients belong here."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


class PackedWeight:
    """A copy of a weight [O, I] in the order in which oneDNN reads it on a CPU, for inference.

    torch's own products take weights as they are, which takes 1.5 to 1.9 times as long for 16 tokens, and in bf16 also for one.
    """

    def __init__(self, weight: Tensor) -> None:
        self.shape, self.dtype = weight.shape, weight.dtype
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)

    @staticmethod
    def is_supported(device: torch.device, dtype: torch.dtype) -> bool:
        """Whether this build of torch and this machine can multiply packed weights."""
        if device.type != "cpu" or not torch.backends.mkldnn.is_available():
            return False
        if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        return dtype in (torch.float32, torch.bfloat16) and hasattr(torch.ops.mkldnn, "_linear_pointwise")

    def to(self, dtype: torch.dtype) -> "PackedWeight":
        """Itself: a packed weight has the dtype of the activations."""
        assert dtype == self.dtype, "a packed weight has the dtype of the activations"
        return self

    def product(self, x: Tensor) -> Tensor:
        """x W^T, [..., I] -> [..., O]."""
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, None, "none", [], "")
        return y


def by_columns(weight: Tensor) -> Tensor:
    """The same matrix [O, I], stored by columns. The product with one token then adds O numbers at a time.

    A row-wise product of short rows, such as the r numbers of a row of B, reaches half of the memory bandwidth of a CPU in fp32.
    """
    return weight.t().contiguous().t()


Weight = Tensor | PackedWeight
"""The weight of a linear."""


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """Differentiable x W^T (+ b), [..., I] x [O, I] -> [..., O], in x's dtype: master weights are cast here."""
    if isinstance(weight, PackedWeight):
        return weight.product(x)
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
