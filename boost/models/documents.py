"""Attention within documents, without the scores between them.

Legend: B sequences, S tokens of each, T = B * S, N documents, H query heads and K key/value heads held here, E width of a head.
"""

import functools
import inspect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from boost.config.attention import DocumentForm, document_form

Lengths = tuple[tuple[int, ...], ...]
"""Tokens of each document, by sequence; a document that spans two sequences counts as two."""


@dataclass(frozen=True)
class Documents:
    """The documents of a micro-batch, in the form that attention takes."""

    form: DocumentForm
    lengths: Lengths
    starts_N: Tensor | None = None
    """varlen: where each document starts in [T, ...], int32, then T, more than once, so that few batches differ in N."""
    mask: Tensor | None = None
    """mask: [B, 1, S, S] to add to the scores: 0 where a token may look, -inf elsewhere."""
    before: int | None = None
    """Tokens of the first document that lie in the half of the sequence before this one, whose keys come in front; None: all of
    that half's keys do (mask), or there is none."""

    def split(self, sizes: Sequence[int]) -> "list[Documents]":
        """Of parts with so many sequences."""
        ends = list(itertools.accumulate(sizes))
        each = [self.lengths[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        masks = [None] * len(sizes) if self.mask is None else list(self.mask.split(list(sizes)))
        device = None if self.starts_N is None else self.starts_N.device
        starts = [None if device is None else _starts(lengths, device) for lengths in each]
        return [Documents(self.form, *of_part) for of_part in zip(each, starts, masks, strict=True)]

    def split_tokens(self, tokens: int) -> "tuple[Documents, Documents]":
        """Of the first `tokens` tokens of one sequence, and of those after them."""
        if self.mask is not None:
            first, second = self.mask[:, :, :tokens, :tokens], self.mask[:, :, tokens:]
            return replace(self, mask=first), replace(self, mask=second)
        ends = list(itertools.accumulate(self.lengths[0]))
        start = max((end for end in ends if end <= tokens), default=0)
        cut = {0, tokens, *ends}
        heads, tails = (
            tuple(b - a for a, b in itertools.pairwise(sorted(each)))
            for each in ({c for c in cut if c <= tokens}, {c for c in cut if c >= tokens})
        )
        device = None if self.starts_N is None else self.starts_N.device
        starts = [None if device is None else _starts((each,), device) for each in (heads, tails)]
        return (
            Documents(self.form, (heads,), starts[0]),
            Documents(self.form, (tails,), starts[1], before=tokens - start),
        )

    def attend(self, q_BHSE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor) -> Tensor:
        """softmax(q k^T / sqrt(E)) v, [T, H * E], for segments and varlen."""
        q_THE, k_TKE, v_TKE = (x.transpose(1, 2).flatten(0, 1) for x in (q_BHSE, k_BKSE, v_BKSE))
        before = self.before or 0
        if self.form == "varlen":
            assert self.starts_N is not None
            starts_N = self.starts_N
            key_starts_N = torch.where(starts_N > 0, starts_N + before, 0) if before else starts_N
            return _varlen(q_THE, k_TKE, v_TKE, (starts_N, key_starts_N), k_BKSE.shape[2]).flatten(1)
        return _segments(q_THE, k_TKE, v_TKE, self.lengths, before).flatten(1)


def causal(q_BHSE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(E)) v, [B, H, S, E], where a query sees the keys up to its own; fewer queries than keys are those of
    the last tokens."""
    grouped, tokens, keys = q_BHSE.shape[1] != k_BKSE.shape[1], q_BHSE.shape[2], k_BKSE.shape[2]
    if tokens == keys:
        return F.scaled_dot_product_attention(q_BHSE, k_BKSE, v_BKSE, is_causal=True, enable_gqa=grouped)
    if q_BHSE.device.type == "cuda" and q_BHSE.dtype in (torch.bfloat16, torch.float16):
        return F.scaled_dot_product_attention(
            q_BHSE, k_BKSE, v_BKSE, attn_mask=causal_lower_right(tokens, keys), enable_gqa=grouped
        )
    # Queries of no token in front: a third more scores than needed, but no mask of tokens x keys. Padded in the order of memory,
    # so that what attention returns is laid out by tokens.
    padded_BSHE = F.pad(q_BHSE.transpose(1, 2), (0, 0, 0, 0, keys - tokens, 0))
    attended = F.scaled_dot_product_attention(
        padded_BSHE.transpose(1, 2), k_BKSE, v_BKSE, is_causal=True, enable_gqa=grouped
    )
    return attended.narrow(2, keys - tokens, tokens)


def documents_of(document_ids_BS: Tensor, device: torch.device, dtype: torch.dtype, compiled: bool) -> Documents | None:
    """The documents of these ids, which do not have to be on the device: they are read by the host. None if each sequence is one
    document, for which usual attention is right; compiled code on CPUs does not ask."""
    form = document_form(device.type, str(dtype)[6:], compiled)
    if form == "varlen" and not _has_varlen():
        form = "mask"
    lengths = _lengths(document_ids_BS)
    if form == "mask":
        return Documents(form, lengths, mask=_mask(document_ids_BS.to(device, non_blocking=True), dtype))
    if all(len(each) == 1 for each in lengths):
        return None
    return Documents(form, lengths, _starts(lengths, device) if form == "varlen" else None)


def _lengths(document_ids_BS: Tensor) -> Lengths:
    def of_row(row_S: Tensor) -> tuple[int, ...]:
        return tuple(torch.unique_consecutive(row_S, return_counts=True)[1].tolist())

    return tuple(of_row(row_S) for row_S in document_ids_BS.cpu())


def _starts(lengths: Lengths, device: torch.device) -> Tensor:
    ends = list(itertools.accumulate(itertools.chain(*lengths), initial=0))
    size = 1 << (len(ends) - 1).bit_length()
    return torch.tensor([*ends, *[ends[-1]] * (size - len(ends))], dtype=torch.int32).to(device, non_blocking=True)


def _mask(document_ids_BS: Tensor, dtype: torch.dtype) -> Tensor:
    length = document_ids_BS.shape[1]
    same = document_ids_BS[:, None, :, None] == document_ids_BS[:, None, None, :]
    allowed = same & torch.ones(length, length, dtype=torch.bool, device=same.device).tril()
    # Of the activations' dtype: from a mask of booleans every block would make, and keep, one of its own.
    return torch.zeros(allowed.shape, dtype=dtype, device=same.device).masked_fill_(~allowed, -math.inf)


def _segments(q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor, lengths: Lengths, before: int) -> Tensor:
    """[T, H, E], one document after another; `before`: keys of the first one in front of its queries' own."""
    sizes = list(itertools.chain(*lengths))
    key_sizes = [sizes[0] + before, *sizes[1:]]
    each = ((q_THE, sizes), (k_TKE, key_sizes), (v_TKE, key_sizes))
    queries, keys, values = ([x.transpose(0, 1)[None] for x in y.split(lengths)] for y, lengths in each)
    attended = [causal(q, k, v) for q, k, v in zip(queries, keys, values, strict=True)]
    return torch.cat([a[0].transpose(0, 1) for a in attended])


@functools.cache
def _has_varlen() -> bool:
    """Whether torch has it with a window and grouped heads; before 2.13, a mask takes its place."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return {"window_size", "enable_gqa"} <= set(inspect.signature(varlen_attn).parameters)


def _varlen(q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor, starts: tuple[Tensor, Tensor], longest: int) -> Tensor:
    """[T, H, E]. `starts`: of queries, and of keys; `longest`: the sequence length rather than the longest document, for compiled
    code the same in all batches."""
    from torch.nn.attention.varlen import varlen_attn

    grouped = q_THE.shape[1] != k_TKE.shape[1]
    attended = varlen_attn(q_THE, k_TKE, v_TKE, *starts, longest, longest, window_size=(-1, 0), enable_gqa=grouped)
    assert isinstance(attended, Tensor), "nothing else was asked for"
    return attended
