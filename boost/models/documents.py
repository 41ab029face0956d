"""Attention within documents, without the scores between them.

Legend: B sequences, S tokens of each, T = B * S, N documents, H query heads and K key/value heads held here, E width of a head.
"""

import functools
import inspect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

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

    def split(self, sizes: Sequence[int]) -> "list[Documents]":
        """Of parts with so many sequences."""
        ends = list(itertools.accumulate(sizes))
        each = [self.lengths[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        masks = [None] * len(sizes) if self.mask is None else list(self.mask.split(list(sizes)))
        device = None if self.starts_N is None else self.starts_N.device
        starts = [None if device is None else _starts(lengths, device) for lengths in each]
        return [Documents(self.form, *of_part) for of_part in zip(each, starts, masks, strict=True)]

    def attend(self, q_BHSE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor) -> Tensor:
        """softmax(q k^T / sqrt(E)) v, [T, H * E], for segments and varlen."""
        q_THE, k_TKE, v_TKE = (x.transpose(1, 2).flatten(0, 1) for x in (q_BHSE, k_BKSE, v_BKSE))
        if self.form == "varlen":
            assert self.starts_N is not None
            return _varlen(q_THE, k_TKE, v_TKE, self.starts_N, q_BHSE.shape[2]).flatten(1)
        return _segments(q_THE, k_TKE, v_TKE, self.lengths).flatten(1)


def documents_of(document_ids_BS: Tensor, device: torch.device, dtype: torch.dtype, compiled: bool) -> Documents | None:
    """The documents of these ids, which do not have to be on the device: they are read by the host. None if each sequence is one
    document, for which usual attention is right; compiled code on CPUs does not ask."""
    form = document_form(device.type, str(dtype)[6:], compiled)
    if form == "varlen" and not _has_varlen():
        form = "mask"
    lengths = _lengths(document_ids_BS)
    if form == "mask":
        return Documents(form, lengths, mask=_mask(document_ids_BS.to(device), dtype))
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


def _segments(q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor, lengths: Lengths) -> Tensor:
    """[T, H, E], one document after another."""
    sizes = list(itertools.chain(*lengths))
    grouped = q_THE.shape[1] != k_TKE.shape[1]
    queries, keys, values = ([x.transpose(0, 1)[None] for x in y.split(sizes)] for y in (q_THE, k_TKE, v_TKE))
    attended = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        for q, k, v in zip(queries, keys, values, strict=True)
    ]
    return torch.cat([a[0].transpose(0, 1) for a in attended])


@functools.cache
def _has_varlen() -> bool:
    """Whether torch has it with a window and grouped heads; before 2.13, a mask takes its place."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return {"window_size", "enable_gqa"} <= set(inspect.signature(varlen_attn).parameters)


def _varlen(q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor, starts_N: Tensor, longest: int) -> Tensor:
    """[T, H, E]. `longest`: the sequence length rather than the longest document, for compiled code the same in all batches."""
    from torch.nn.attention.varlen import varlen_attn

    causal, grouped = (-1, 0), q_THE.shape[1] != k_TKE.shape[1]
    attended = varlen_attn(
        q_THE, k_TKE, v_TKE, starts_N, starts_N, longest, longest, window_size=causal, enable_gqa=grouped
    )
    assert isinstance(attended, Tensor), "nothing else was asked for"
    return attended
