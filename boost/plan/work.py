"""What an operation is to the performance model: a GEMM with its shape, attention, or bytes that are moved. Arithmetic only.

Bytes are read and written, each tensor once an operation.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from boost.config.traffic import ITEMSIZE, statistic_dtype

GEMM = "gemm"
ATTENTION = "attention"
ATTENTION_BACKWARD = "attention backward"
STREAM = "elementwise"
SILU = "silu"
SILU_BACKWARD = "silu backward"
REDUCE = "sum"
LOSS = "softmax"
LOOKUP = "lookup"
OPTIMIZER = "optimizer"

KERNELS = {
    GEMM: "matrix products",
    ATTENTION: "softmax(q k^T) v, fused",
    ATTENTION_BACKWARD: "its gradients",
    STREAM: "add, multiply, copy, cast",
    SILU: "x sigmoid(x)",
    SILU_BACKWARD: "its gradient",
    REDUCE: "sums over rows or columns",
    LOSS: "logsumexp, exp and their gradient over logits",
    LOOKUP: "rows of the embedding, and the sum of their gradients",
    OPTIMIZER: "AdamW's update, clipping, the norm of gradients",
}
"""Kinds of operations that hardware does at speeds of their own."""


@dataclass(frozen=True)
class Work:
    """Operations that are alike: `calls` of them, one behind the other."""

    kernel: str
    """One of KERNELS."""
    dtype: str
    shape: tuple[int, ...]
    """GEMM: (batch, m, n, k), [m, k] x [k, n]; attention: (sequences, heads, key/value heads, tokens, width of a head); else: the
    elements that one call makes."""
    flops: int
    """Of one call."""
    bytes: int
    """Read and written by one call."""
    calls: int = 1
    place: str = ""
    """What it belongs to: embed | qkv | attention | o | gate_up | product | down | norm | residual | loss | weights | optimizer."""
    phase: str = ""
    """forward | recompute | backward (of one micro-batch) | step."""

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: FLOPs for each byte moved."""
        return self.flops / self.bytes if self.bytes else math.inf


Works = Iterator[Work]


def gemm(m: int, n: int, k: int, dtype: str, place: str = "", batch: int = 1, calls: int = 1) -> Work:
    """[m, k] x [k, n], `batch` times in one call."""
    size = batch * (m * k + k * n + m * n) * ITEMSIZE[dtype]
    return Work(GEMM, dtype, (batch, m, n, k), 2 * batch * m * n * k, size, calls, place)


def gradients(product: Work) -> Works:
    """The two products of the backward pass: of the input, and of the weight (n x k)."""
    batch, m, n, k = product.shape
    yield gemm(m, k, n, product.dtype, product.place, batch, product.calls)
    yield gemm(n, k, m, product.dtype, product.place, batch, product.calls)


def moved(kernel: str, elements: int, times: float, dtype: str, calls: int = 1) -> Work:
    """An operation that makes `elements` and reads and writes `times` as many numbers."""
    return Work(kernel, dtype, (elements,), 0, round(times * elements * ITEMSIZE[dtype]), calls)


def norm(elements: int, dtype: str, fused: bool) -> Works:
    """RMSNorm of whole rows: one kernel (GPUs), or a few operations (CPUs)."""
    wide = statistic_dtype(dtype)
    if fused:
        yield replace(moved(STREAM, elements, 2, dtype), place="norm")
        return
    yield replace(moved(REDUCE, elements, 1, dtype), place="norm")
    yield replace(moved(STREAM, elements, 2, wide, calls=2), place="norm")
    if dtype != wide:  # x is read narrow, and what is made of it is rounded again
        yield replace(moved(STREAM, elements, 2, dtype), place="norm")


def norm_backward(elements: int, dtype: str, fused: bool) -> Works:
    """Its gradients, of rows and gain."""
    wide = statistic_dtype(dtype)
    if fused:
        yield replace(moved(STREAM, elements, 5, dtype), place="norm")
        return
    if dtype != wide:
        yield replace(moved(STREAM, elements, 1 + ITEMSIZE[wide] / ITEMSIZE[dtype], dtype, calls=2), place="norm")
    for times in (2, 3, 2, 3, 3, 2):
        yield replace(moved(STREAM, elements, times, wide), place="norm")
    yield replace(moved(REDUCE, elements, 1, wide, calls=2), place="norm")
