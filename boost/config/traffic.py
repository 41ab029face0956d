"""Communication constants shared by the runtime and the performance model."""

import math
from collections.abc import Sequence
from typing import NamedTuple

ITEMSIZE = {"bfloat16": 2, "float32": 4, "float64": 8}
"""Bytes per element, by dtype."""

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL = "all-reduce", "all-gather", "reduce-scatter", "all-to-all"
"""Kinds of collectives."""

STATISTIC_TERMS = 3
"""Number of bf16 values that represent one fp32 value exactly: 3 x 8 bits of significand."""

CHUNK_ELEMENTS = 1 << 26
"""Local logits per chunk of the loss: 128 MiB in bf16, 256 MiB in fp32."""

CHUNK_TOKENS = 2048
"""Minimum number of tokens per chunk, for any vocabulary. A chunk of N tokens takes 6 N FLOPs per element of the head's gradient,
and adding its gradient moves 10 bytes or more per element. With 512 tokens, an H200 spends as long on the sum as on the GEMMs."""

BUCKET_BYTES = 25 * 2**20
"""Minimum size of every gradient bucket except the last. Limits the number of launches; buckets are copied one at a time."""

BUCKETS = 8
"""If gradients fill fewer than this many buckets of BUCKET_BYTES, they are divided into about this many smaller ones, so that all
but the last are reduced during the backward pass."""

LEAST_BUCKET_BYTES = 2**20
"""Minimum size of these smaller buckets."""


class Collective(NamedTuple):
    """One collective from the perspective of one process."""

    phase: str
    """forward | recompute | backward (of one micro-batch) | step (once per optimizer step)"""
    kind: str
    """all-reduce | all-gather | reduce-scatter | all-to-all | send (to the neighboring pipeline stage)"""
    shape: tuple[int, ...]
    """Shape of the payload: the tensor (all-reduce), the gathered tensor (all-gather, reduce-scatter), one process's part of the
    tensor (all-to-all), the sent tensor (send)."""
    dtype: str
    processes: int
    place: str = ""
    """Purpose: embed | qkv | o | gate_up | down | head | loss | pipeline | weights | gradients | optimizer | step stats."""
    layer: int | None = None
    """Index of the block, for the four groups and for weights that are gathered with the block."""
    axis: str = "tp"
    """Participating processes: tp | cp | dp (for weights: dp x cp) | replicas (dp x cp x tp) | pp (two neighbors) | world."""

    @property
    def elements(self) -> int:
        """Number of elements in the payload."""
        return math.prod(self.shape)

    @property
    def on_the_wire(self) -> tuple[str, str, int, str, int]:
        """What can be observed at run time: (phase, kind, elements, dtype, processes). Recomputation is part of the backward
        pass."""
        phase = "backward" if self.phase == "recompute" else self.phase
        return phase, self.kind, self.elements, self.dtype, self.processes

    @property
    def sent_bytes(self) -> int:
        """Bytes that one process sends: 2N(p-1)/p for an all-reduce of N bytes, N(p-1)/p for the others, N for a send."""
        if self.kind == "send":
            return self.elements * ITEMSIZE[self.dtype]
        factor = 2 if self.kind == "all-reduce" else 1
        return factor * self.elements * ITEMSIZE[self.dtype] * (self.processes - 1) // self.processes


def statistic_dtype(dtype: str) -> str:
    """Dtype of RMSNorm's statistic and of logits: fp32, or fp64 for fp64 activations."""
    return "float64" if dtype == "float64" else "float32"


def statistic_columns(dtype: str, processes: int) -> int:
    """Elements per token that online RMSNorm's statistic adds to a payload of `dtype`."""
    return 1 if dtype == statistic_dtype(dtype) else STATISTIC_TERMS * processes


def chunk_tokens(vocabulary: int) -> int:
    """Tokens per chunk of logits over `vocabulary` local rows."""
    return 1 << max(CHUNK_ELEMENTS // vocabulary, CHUNK_TOKENS).bit_length() - 1


def bucket_bytes(total: int) -> int:
    """Size at which a bucket is full, for `total` bytes of gradients."""
    return min(BUCKET_BYTES, max(total // BUCKETS, LEAST_BUCKET_BYTES))


def bucket_lengths(sizes: Sequence[int], full: int | None = None) -> list[int]:
    """Number of consecutive tensors in each bucket. `sizes`: bytes in each tensor, in order. `full`: size at which a bucket is
    full; default: `bucket_bytes`."""
    full = bucket_bytes(sum(sizes)) if full is None else full
    lengths: list[int] = []
    filled = full
    for size in sizes:
        if filled >= full:
            lengths.append(0)
            filled = 0
        lengths[-1] += 1
        filled += size
    return lengths
