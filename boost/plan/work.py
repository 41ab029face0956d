"""Operations in the performance model: a GEMM with its shape, attention, or bytes moved.

Each tensor that an operation reads or writes counts once toward its bytes.
"""

import math
from collections import Counter
from typing import NamedTuple

from boost.config.traffic import ITEMSIZE

# Kinds of operations that may have their own speed in a hardware profile.
GEMM = "gemm"
ATTENTION = "attention"  # softmax(q k^T) v, fused
ATTENTION_BACKWARD = "attention backward"
STREAM = "elementwise"  # add, multiply, copy, cast
REORDER = "reorder"  # copies that reorder elements (transpose)
REORDER_FINELY = "reorder finely"  # the same, with short contiguous runs
SILU = "silu"
SILU_BACKWARD = "silu backward"
REDUCE = "sum"  # over rows or columns
LOSS = "softmax"  # logsumexp, exp and their gradient over logits
LOOKUP = "lookup"  # embedding and its backward
OPTIMIZER = "optimizer"  # AdamW update, gradient clipping and norm

SHORT_RUN = 256
"""Run length in elements. Copies with shorter contiguous runs are slower on CPUs."""


class Work(NamedTuple):
    """One operation."""

    kernel: str
    """Kind of operation, such as GEMM."""
    dtype: str
    shape: tuple[int, ...]
    """GEMM: (batch, m, n, k), [m, k] x [k, n]. Attention: (sequences, heads, key/value heads, tokens, head dimension), followed by
    the number of keys if there are fewer queries than keys. Otherwise: shape of the output."""
    flops: int
    bytes: int
    """Bytes read and written."""
    place: str = ""
    """Part of the model: embed | qkv | attention | o | gate_up | product | down | norm | residual | loss | weights | optimizer."""
    phase: str = ""
    """forward | recompute | backward (of one micro-batch) | step."""

    @classmethod
    def of(
        cls, kernel: str, shape: tuple[int, ...], dtype: str, moves: float = 0.0, place: str = "", phase: str = ""
    ) -> "Work":
        """Builds an operation. `moves`: elements read and written per output element; ignored for GEMMs and attention."""
        flops, numbers = 0, moves * math.prod(shape)
        if kernel == GEMM:
            batch, m, n, k = shape
            flops, numbers = 2 * batch * m * n * k, batch * (m * k + k * n + m * n)
        elif kernel in (ATTENTION, ATTENTION_BACKWARD):
            sequences, heads, kv, tokens, width, *rest = shape
            keys = rest[0] if rest else tokens
            # Causal: a query attends to keys up to its own position. Two matmuls forward, five backward (scores are recomputed).
            products, tensors = (2, 2) if kernel == ATTENTION else (5, 4)
            flops = products * sequences * (2 * keys - tokens) * tokens * heads * width
            numbers = tensors * sequences * width * (tokens * heads + keys * kv)
        return cls(kernel, dtype, shape, flops, round(numbers * ITEMSIZE[dtype]), place=place, phase=phase)

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: FLOPs per byte moved."""
        return self.flops / self.bytes if self.bytes else math.inf


Counted = Counter[Work]
"""How often each operation runs."""


def gemm(m: int, n: int, k: int, dtype: str, batch: int = 1) -> Work:
    """A GEMM [m, k] x [k, n], `batch` times."""
    return Work.of(GEMM, (batch, m, n, k), dtype)


def moved(kernel: str, elements: int, times: float, dtype: str) -> Work:
    """An operation with `elements` outputs that reads and writes `times` as many elements."""
    return Work.of(kernel, (elements,), dtype, times)
