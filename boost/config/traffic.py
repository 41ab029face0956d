"""Communication constants shared by the runtime and the performance model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

ITEMSIZE = {"bfloat16": 2, "float32": 4, "float64": 8}
"""Bytes of one element of a dtype."""

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL = "all-reduce", "all-gather", "reduce-scatter", "all-to-all"
"""Kinds of collectives."""

STATISTIC_TERMS = 3
"""bf16 numbers that hold one fp32 number exactly: 3 x 8 bits of significand."""

CHUNK_ELEMENTS = 1 << 23
"""Logits of one chunk of the loss, on one process: 32 MiB of fp32."""

CHUNK_TOKENS = 512
"""Least tokens of a chunk, whatever the vocabulary. A chunk of N tokens does 6 N operations for each number of the head's gradient,
which it reads and writes (8 bytes or more): with fewer tokens a GPU waits for its memory."""

BUCKET_BYTES = 25 * 2**20
"""Gradients are reduced in buckets of at least this size but for the last: few launches, and a copy of one bucket at a time."""

BUCKETS = 8
"""About so many buckets, of at least LEAST_BUCKET_BYTES, where gradients do not fill as many of BUCKET_BYTES: all but the last are
reduced behind the backward pass."""

LEAST_BUCKET_BYTES = 2**20


@dataclass(frozen=True)
class Collective:
    """One collective, as one process takes part in it."""

    phase: str
    """forward | recompute | backward (of one micro-batch) | step (once an optimizer step)"""
    kind: str
    """all-reduce | all-gather | reduce-scatter | all-to-all | send (to the neighbor in a pipeline)"""
    shape: tuple[int, ...]
    """The payload: the tensor (all-reduce), the gathered tensor (all-gather, reduce-scatter), one process's part of
    the tensor (all-to-all), what is sent (send)."""
    dtype: str
    processes: int
    place: str = ""
    """What it serves: embed | qkv | o | gate_up | down | head | loss | pipeline | weights | gradients | optimizer | step stats."""
    layer: int | None = None
    """Number of the block, for the four groups and for weights that are gathered with it."""
    axis: str = "tp"
    """Which processes take part: tp | cp | dp (of weights: dp x cp) | replicas (dp x cp x tp) | pp (two neighbors) | world."""

    @property
    def elements(self) -> int:
        """Elements of the payload."""
        return math.prod(self.shape)

    @property
    def on_the_wire(self) -> tuple[str, str, int, str, int]:
        """What is observable at run time: (phase, kind, elements, dtype, processes). Recomputation is part of backward."""
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
    return max(CHUNK_ELEMENTS // vocabulary, CHUNK_TOKENS)


def bucket_bytes(total: int) -> int:
    """Bytes of a bucket that takes no more, of `total` bytes of gradients."""
    return min(BUCKET_BYTES, max(total // BUCKETS, LEAST_BUCKET_BYTES))


def bucket_lengths(sizes: Sequence[int], full: int | None = None) -> list[int]:
    """How many of the tensors of `sizes` bytes, in order, share each bucket. `full`: bytes of a bucket that takes no more,
    `bucket_bytes` unless said."""
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
