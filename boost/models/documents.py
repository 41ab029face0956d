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
    key_starts_N: Tensor | None = None
    """varlen: the same of the keys, where `before` says that there are more of them."""
    before: tuple[int, ...] = ()
    """segments and varlen: tokens of the first document of each sequence that come before this part of it, whose keys stand in
    front of its own. Empty: none."""

    def split(self, sizes: Sequence[int]) -> "list[Documents]":
        """Of parts with so many sequences."""
        slices = [slice(end - size, end) for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]
        if self.mask is not None:
            return [replace(self, lengths=self.lengths[each], mask=self.mask[each]) for each in slices]
        return [self._like(self.lengths[each], self.before[each]) for each in slices]

    def part(self, start: int, end: int) -> "Documents":
        """Of tokens `start` to `end` of each sequence, which look at keys up to `end`."""
        ends = [list(itertools.accumulate(row)) for row in self.lengths]
        cuts = [(start, *(cut for cut in row if start < cut < end), end) for row in ends]
        lengths = tuple(tuple(b - a for a, b in itertools.pairwise(row)) for row in cuts)
        if self.mask is not None:
            return replace(self, lengths=lengths, mask=self.mask[:, :, start:end, :end])
        before = tuple(start - max((cut for cut in row if cut <= start), default=0) for row in ends)
        return self._like(lengths, before)

    def _like(self, lengths: Lengths, before: tuple[int, ...]) -> "Documents":
        """Others in the same form, which has no mask."""
        before = before if any(before) else ()
        if self.starts_N is None:
            return Documents(self.form, lengths, before=before)
        device, keys = self.starts_N.device, None
        if before:
            keys = _starts(_with_keys_before(lengths, before), device)
        return Documents(self.form, lengths, _starts(lengths, device), key_starts_N=keys, before=before)

    @property
    def tokens_before(self) -> int | None:
        """Tokens of each sequence before this part of which a key may be needed; None: all."""
        return None if self.mask is not None else max(self.before, default=0)

    def attend(self, q_BHSE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor) -> Tensor:
        """softmax(q k^T / sqrt(E)) v, [B, H, S, E]. Of more keys than needed, the last ones are."""
        if self.mask is not None:
            grouped = q_BHSE.shape[1] != k_BKSE.shape[1]
            return F.scaled_dot_product_attention(q_BHSE, k_BKSE, v_BKSE, attn_mask=self.mask, enable_gqa=grouped)
        q_THE = q_BHSE.transpose(1, 2).flatten(0, 1)
        before = self.before or (0,) * len(self.lengths)
        needed = [q_BHSE.shape[2] + more for more in before]
        k_TKE, v_TKE = (_last_tokens(x, needed) for x in (k_BKSE, v_BKSE))
        if self.form == "varlen":
            assert self.starts_N is not None
            starts = self.starts_N, self.starts_N if self.key_starts_N is None else self.key_starts_N
            a_THE = _varlen(q_THE, k_TKE, v_TKE, starts, k_BKSE.shape[2])
        else:
            a_THE = _segments(q_THE, k_TKE, v_TKE, self.lengths, before)
        return a_THE.unflatten(0, (q_BHSE.shape[0], -1)).transpose(1, 2)


def _with_keys_before(lengths: Sequence[Sequence[int]], before: Sequence[int]) -> Lengths:
    """Keys of each document, by sequence."""
    return tuple((first + more, *rest) for (first, *rest), more in zip(lengths, before, strict=True))


def _last_tokens(x_BKSE: Tensor, needed: Sequence[int]) -> Tensor:
    """The last so many tokens of each sequence, one below the other, [tokens, K, E]."""
    x_BSKE, length = x_BKSE.transpose(1, 2), x_BKSE.shape[2]
    if all(each == length for each in needed):
        return x_BSKE.flatten(0, 1)
    return torch.cat([row[length - each :] for row, each in zip(x_BSKE, needed, strict=True)])


def causal(q_BHSE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(E)) v, [B, H, S, E], where a query sees the keys up to its own; fewer queries than keys are those of
    the last tokens."""
    grouped, tokens, keys = q_BHSE.shape[1] != k_BKSE.shape[1], q_BHSE.shape[2], k_BKSE.shape[2]
    if tokens == keys:
        return F.scaled_dot_product_attention(q_BHSE, k_BKSE, v_BKSE, is_causal=True, enable_gqa=grouped)
    if q_BHSE.device.type == "cuda" and q_BHSE.dtype in (torch.bfloat16, torch.float16):
        return F.scaled_dot_product_attention(
            q_BHSE, k_BKSE, v_BKSE, attn_mask=last_queries(tokens, keys), enable_gqa=grouped
        )
    if 2 * tokens < keys:
        return _causal_by_rows(q_BHSE, k_BKSE, v_BKSE)
    # Queries of no token in front: a third more scores than needed, but no mask of tokens x keys. Padded in the order of memory,
    # so that what attention returns is laid out by tokens.
    padded_BSHE = F.pad(q_BHSE.transpose(1, 2), (0, 0, 0, 0, keys - tokens, 0))
    attended = F.scaled_dot_product_attention(
        padded_BSHE.transpose(1, 2), k_BKSE, v_BKSE, is_causal=True, enable_gqa=grouped
    )
    return attended.narrow(2, keys - tokens, tokens)


def last_queries(tokens: int, keys: int) -> Tensor:
    """torch's description of a causal mask of fewer queries than keys. As torch makes it, it is a tensor of tokens x keys in host
    memory that nobody fills or reads: 34 GB for the second half of a sequence of 131,072."""
    from torch.nn.attention.bias import causal_lower_right  # a second, for torch._dynamo

    bias = causal_lower_right(1, 2)
    bias.seq_len_q, bias.seq_len_kv = tokens, keys
    return bias


_MASK_ROWS = 256
"""Queries to which one mask is applied at a time."""


def _causal_by_rows(q_BHSE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor) -> Tensor:
    """`causal` of few queries: some at a time, all under views of one mask."""
    tokens, keys, found = q_BHSE.shape[2], k_BKSE.shape[2], []
    most = min(tokens, _MASK_ROWS)
    hidden = torch.ones(most, keys, dtype=torch.bool, device=q_BHSE.device).triu(keys - most + 1)
    mask = torch.zeros(most, keys, dtype=q_BHSE.dtype, device=q_BHSE.device).masked_fill_(hidden, -math.inf)
    for start in range(0, tokens, most):
        rows = min(most, tokens - start)
        seen = keys - tokens + start + rows
        q, k, v = q_BHSE.narrow(2, start, rows), k_BKSE.narrow(2, 0, seen), v_BKSE.narrow(2, 0, seen)
        of_rows = mask.narrow(0, most - rows, rows).narrow(1, keys - seen, seen)
        grouped = q.shape[1] != k.shape[1]
        found.append(F.scaled_dot_product_attention(q, k, v, attn_mask=of_rows, enable_gqa=grouped))
    # By tokens in memory, as each of them is.
    return torch.cat([a.transpose(1, 2) for a in found], dim=1).transpose(1, 2)


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


def _starts(lengths: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    ends = list(itertools.accumulate(itertools.chain(*lengths), initial=0))
    size = 1 << (len(ends) - 1).bit_length()
    return torch.tensor([*ends, *[ends[-1]] * (size - len(ends))], dtype=torch.int32).to(device, non_blocking=True)


def _mask(document_ids_BS: Tensor, dtype: torch.dtype) -> Tensor:
    length = document_ids_BS.shape[1]
    same = document_ids_BS[:, None, :, None] == document_ids_BS[:, None, None, :]
    allowed = same & torch.ones(length, length, dtype=torch.bool, device=same.device).tril()
    # Of the activations' dtype: from a mask of booleans every block would make, and keep, one of its own.
    return torch.zeros(allowed.shape, dtype=dtype, device=same.device).masked_fill_(~allowed, -math.inf)


def _segments(q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor, lengths: Lengths, before: Sequence[int]) -> Tensor:
    """[T, H, E], one document after another; `before`: keys of each sequence's first one in front of its queries' own."""
    sizes = list(itertools.chain(*lengths))
    key_sizes = list(itertools.chain(*_with_keys_before(lengths, before)))
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
