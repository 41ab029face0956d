"""Numbers of the wire on which runtime and performance model must agree: one place, arithmetic only."""

from collections.abc import Sequence
from dataclasses import dataclass

ITEMSIZE = {"bfloat16": 2, "float32": 4, "float64": 8}
"""Bytes of one element of a dtype."""

STATISTIC_TERMS = 3
"""bf16 numbers that hold one fp32 number exactly: 3 x 8 bits of significand."""

CHUNK_ELEMENTS = 1 << 23
"""Logits of one chunk of the loss, on one process: 32 MiB of fp32, whatever the vocabulary."""

BUCKET_BYTES = 25 * 2**20
"""Gradients are reduced in buckets of at least this size but for the last: few launches, and a copy of one bucket at a time."""


@dataclass(frozen=True)
class Collective:
    """One collective, as one process takes part in it."""

    phase: str
    """forward | backward (of one micro-batch) | step (once an optimizer step)"""
    kind: str
    """all-reduce | all-gather | reduce-scatter | all-to-all"""
    elements: int
    """Elements of the whole payload: of the tensor (all-reduce), of the gathered size (the others)."""
    dtype: str
    processes: int

    @property
    def sent_bytes(self) -> int:
        """Bytes that one process sends: 2N(p-1)/p for an all-reduce of N bytes, N(p-1)/p for the others."""
        factor = 2 if self.kind == "all-reduce" else 1
        return factor * self.elements * ITEMSIZE[self.dtype] * (self.processes - 1) // self.processes


def statistic_dtype(dtype: str) -> str:
    """Dtype of RMSNorm's statistic and of logits: fp32, or fp64 for fp64 activations."""
    return "float64" if dtype == "float64" else "float32"


def statistic_elements(tokens: int, dtype: str, processes: int) -> int:
    """Elements that the statistic of online RMSNorm adds to a payload of `dtype`."""
    return tokens if dtype == statistic_dtype(dtype) else STATISTIC_TERMS * processes * tokens


def chunk_tokens(vocabulary: int) -> int:
    """Tokens whose logits over `vocabulary` local rows are alive at once."""
    return max(CHUNK_ELEMENTS // vocabulary, 1)


def bucket_lengths(sizes: Sequence[int]) -> list[int]:
    """How many of the tensors of `sizes` bytes, in order, share each bucket."""
    lengths, filled = [], BUCKET_BYTES
    for size in sizes:
        if filled >= BUCKET_BYTES:
            lengths.append(0)
            filled = 0
        lengths[-1] += 1
        filled += size
    return lengths
