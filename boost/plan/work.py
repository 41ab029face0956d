"""What an operation is to the performance model: a GEMM with its shape, attention, or bytes that are moved. Arithmetic only.

Bytes are read and written, each tensor once an operation.
"""

import math
from collections import Counter
from dataclasses import dataclass

from boost.config.traffic import ITEMSIZE

GEMM = "gemm"
ATTENTION = "attention"
ATTENTION_BACKWARD = "attention backward"
STREAM = "elementwise"
REORDER = "reorder"
REORDER_FINELY = "reorder finely"
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
    REORDER: "copies that change the order of elements",
    REORDER_FINELY: "the same in short runs",
    SILU: "x sigmoid(x)",
    SILU_BACKWARD: "its gradient",
    REDUCE: "sums over rows or columns",
    LOSS: "logsumexp, exp and their gradient over logits",
    LOOKUP: "rows of the embedding, and the sum of their gradients",
    OPTIMIZER: "AdamW's update, clipping, the norm of gradients",
}
"""Kinds of operations that hardware does at speeds of their own."""


SHORT_RUN = 256
"""Elements. Copies that move fewer of them at a time from one place are slower on CPUs."""


@dataclass(frozen=True)
class Work:
    """One operation."""

    kernel: str
    """One of KERNELS."""
    dtype: str
    shape: tuple[int, ...]
    """GEMM: (batch, m, n, k), [m, k] x [k, n]; attention: (sequences, heads, key/value heads, tokens, width of a head); else: the
    elements that it makes."""
    flops: int
    bytes: int
    """Read and written."""
    place: str = ""
    """What it belongs to: embed | qkv | attention | o | gate_up | product | down | norm | residual | loss | weights | optimizer."""
    phase: str = ""
    """forward | recompute | backward (of one micro-batch) | step."""

    @classmethod
    def of(
        cls, kernel: str, shape: tuple[int, ...], dtype: str, moves: float = 0.0, place: str = "", phase: str = ""
    ) -> "Work":
        """From its shape; `moves`: numbers read and written for each element, where the shape does not say it."""
        flops, numbers = 0, moves * math.prod(shape)
        if kernel == GEMM:
            batch, m, n, k = shape
            flops, numbers = 2 * batch * m * n * k, batch * (m * k + k * n + m * n)
        elif kernel in (ATTENTION, ATTENTION_BACKWARD):
            sequences, heads, kv, tokens, width = shape
            # Causal: half of the scores. Forward two products of them, backward five (it makes the scores again).
            products, tensors = (2, 2) if kernel == ATTENTION else (5, 4)
            flops = products * sequences * tokens**2 * heads * width
            numbers = tensors * sequences * tokens * width * (heads + kv)
        return cls(kernel, dtype, shape, flops, round(numbers * ITEMSIZE[dtype]), place=place, phase=phase)

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: FLOPs for each byte moved."""
        return self.flops / self.bytes if self.bytes else math.inf


Counted = Counter[Work]
"""How often each operation is done."""


def gemm(m: int, n: int, k: int, dtype: str, batch: int = 1) -> Work:
    """[m, k] x [k, n], `batch` times."""
    return Work.of(GEMM, (batch, m, n, k), dtype)


def moved(kernel: str, elements: int, times: float, dtype: str) -> Work:
    """An operation that makes `elements` and reads and writes `times` as many numbers."""
    return Work.of(kernel, (elements,), dtype, times)
