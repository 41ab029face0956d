"""Which form of attention runs where documents are isolated (data.isolate_documents)."""

from typing import Literal

DocumentForm = Literal["segments", "varlen", "mask"]
"""segments: a causal kernel for each document. varlen: one kernel that is given the boundaries. mask: [B, 1, S, S] is added to the
scores, most of which nobody needs."""


def document_form(device: str, compute_dtype: str, compiled: bool) -> DocumentForm:
    """The form on a device ("cpu", "cuda"). Compiled code for CPUs has one graph for all batches, so it takes a mask; on GPUs the
    kernel for boundaries is FlashAttention, which computes in 16 bits only."""
    if device == "cpu":
        return "mask" if compiled else "segments"
    return "varlen" if compute_dtype in ("bfloat16", "float16") else "mask"
