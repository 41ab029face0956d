"""Implementation of attention with isolated documents (data.isolate_documents)."""

from typing import Literal

DocumentForm = Literal["segments", "varlen", "mask"]
"""segments: one causal kernel call per document. varlen: one variable-length kernel that takes the document boundaries. mask: a
[B, 1, S, S] mask added to the scores, which computes all of them."""


def document_form(device: str, compute_dtype: str, compiled: bool) -> DocumentForm:
    """The implementation for a device ("cpu", "cuda"). On CPUs, compiled code uses a mask, because it has one graph for all
    batches. On GPUs the variable-length kernel is FlashAttention, which supports 16-bit dtypes only."""
    if device == "cpu":
        return "mask" if compiled else "segments"
    return "varlen" if compute_dtype in ("bfloat16", "float16") else "mask"
