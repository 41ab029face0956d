"""How attention is implemented with isolated documents (data.isolate_documents), and context parallelism (parallel.cp): which
tokens of each sequence a CP rank holds, and what attention communicates.

A sequence of S tokens is split into 2 cp chunks; CP rank i holds the i-th chunk from the front and the i-th from the back. With a
causal mask, this balances attention over the ranks. The front chunks of all ranks form the first half of the sequence.
Attention communicates whichever is smaller:

- heads: an all-to-all of q, k and v gives each rank all tokens for some heads; a second all-to-all returns the attention output.
  Memory grows only with the number of local tokens. cp must divide the heads; if there are fewer key/value heads than
  ranks, each of these heads is sent to every rank that needs it.
- keys: k and v are all-gathered, and queries stay local.

Legend: n local tokens in a micro-batch; H query heads and K key/value heads per TP rank; E head dimension.
"""

from collections.abc import Iterator
from typing import Literal

from boost.config.layouts import num_shards
from boost.config.layouts.spec import EXCHANGE, GATHER, PlannedComm
from boost.config.schema import ModelConfig, ParallelConfig

DocumentForm = Literal["segments", "varlen", "mask"]
"""segments: one causal kernel call per document. varlen: one variable-length kernel that takes the document boundaries. mask: a
[B, 1, S, S] mask added to the scores, all of which are computed."""


def document_form(device: str, compute_dtype: str, compiled: bool) -> DocumentForm:
    """The implementation for a device ("cpu", "cuda"). On CPUs, compiled code uses a mask, because one graph then serves all
    batches. On GPUs, the variable-length kernel is FlashAttention, which supports 16-bit dtypes only."""
    if device == "cpu":
        return "mask" if compiled else "segments"
    return "varlen" if compute_dtype in ("bfloat16", "float16") else "mask"


PLACE = "attention"
"""`place` of the collectives on the cp axis."""


def chunks_of(rank: int, cp: int) -> tuple[int, int]:
    """Indices of the two chunks (of 2 cp) of each sequence that CP rank `rank` holds."""
    return rank, 2 * cp - 1 - rank


def local_heads(model: ModelConfig, parallel: ParallelConfig) -> tuple[int, int]:
    """(H, K): query heads and key/value heads per TP rank."""
    parts = num_shards(parallel)
    return model.heads // parts, max(model.kv_heads // parts, 1)


def crosses_as_heads(model: ModelConfig, parallel: ParallelConfig) -> bool:
    """Whether to exchange heads instead of gathering keys and values: true if cp divides the heads and this sends no more bytes."""
    cp, (heads, kv_heads) = parallel.cp, local_heads(model, parallel)
    shared = max(kv_heads, cp)
    possible = heads % cp == 0 and (kv_heads % cp == 0 or cp % kv_heads == 0)
    return possible and 2 * heads + 2 * shared <= cp * 2 * kv_heads


def context_comms(model: ModelConfig, parallel: ParallelConfig) -> Iterator[PlannedComm]:
    """The collectives in one block over the cp axis, in forward order. Widths are elements per local token that are sent to all
    other ranks together (heads) or gathered (keys)."""
    if parallel.cp == 1:
        return
    heads, kv_heads = local_heads(model, parallel)
    if not crosses_as_heads(model, parallel):
        yield PlannedComm(GATHER, 2 * kv_heads * model.head_dim, place=PLACE, axis="cp")
        return
    sent = heads + 2 * max(kv_heads, parallel.cp)
    for width in (sent, heads):
        yield PlannedComm(EXCHANGE, width * model.head_dim, place=PLACE, axis="cp")


def context_notes(model: ModelConfig, parallel: ParallelConfig) -> Iterator[str]:
    """One sentence about what attention communicates over the cp axis."""
    if parallel.cp == 1:
        return
    heads, kv_heads = local_heads(model, parallel)
    held = f"each process holds 2 chunks of S / {2 * parallel.cp} tokens from every sequence"
    if crosses_as_heads(model, parallel):
        count = heads // parallel.cp
        yield f"CP {parallel.cp}: {held}; for attention, heads are exchanged, so that each process has {count} of them"
    else:
        what = "1 key/value head is" if kv_heads == 1 else f"{kv_heads} key/value heads are"
        yield f"CP {parallel.cp}: {held}; for attention, {what} gathered"
