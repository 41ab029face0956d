"""Attention within documents that skips the scores between documents.

Legend: B sequences, S tokens in each, T = B * S, N documents, H query and K key/value heads on this process, E head width.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from boost.config.attention import DocumentForm, document_form

Lengths = tuple[tuple[int, ...], ...]
"""Length of each document in tokens, by sequence. A document that spans two sequences counts as two."""


@dataclass(frozen=True)
class Documents:
    """The documents in a micro-batch, in the attention kernel's input format."""

    form: DocumentForm
    lengths: Lengths
    starts_N: Tensor | None = None
    """varlen: start of each document in [T, ...], int32, then T, repeated so that N takes few distinct values."""
    mask: Tensor | None = None
    """mask: [B, 1, S, S], added to the scores: 0 where a token may attend, -inf elsewhere."""
    key_starts_N: Tensor | None = None
    """varlen: starts of the keys, if `before` adds keys."""
    before: tuple[int, ...] = ()
    """segments and varlen: for each sequence, the number of earlier tokens in its first document, whose keys precede the part's
    own. Empty: no such tokens."""

    def split(self, sizes: Sequence[int]) -> "list[Documents]":
        """Splits the documents into parts with `sizes` sequences each."""
        slices = [slice(end - size, end) for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]
        if self.mask is not None:
            return [replace(self, lengths=self.lengths[rows], mask=self.mask[rows]) for rows in slices]
        return [self._like(self.lengths[rows], self.before[rows]) for rows in slices]

    def part(self, start: int, end: int) -> "Documents":
        """The documents in tokens `start` to `end` of each sequence, which attend to keys up to `end`."""
        ends = [list(itertools.accumulate(row)) for row in self.lengths]
        cuts = [(start, *(cut for cut in row if start < cut < end), end) for row in ends]
        lengths = tuple(tuple(b - a for a, b in itertools.pairwise(row)) for row in cuts)
        if self.mask is not None:
            return replace(self, lengths=lengths, mask=self.mask[:, :, start:end, :end])
        before = tuple(start - max((cut for cut in row if cut <= start), default=0) for row in ends)
        return self._like(lengths, before)

    def _like(self, lengths: Lengths, before: tuple[int, ...]) -> "Documents":
        """Builds new documents in the same form, which must not be "mask"."""
        before = before if any(before) else ()
        if self.starts_N is None:
            return Documents(self.form, lengths, before=before)
        device, keys = self.starts_N.device, None
        if before:
            keys = _starts(_with_keys_before(lengths, before), device)
        return Documents(self.form, lengths, _starts(lengths, device), key_starts_N=keys, before=before)

    @property
    def tokens_before(self) -> int | None:
        """Number of tokens before this part whose keys may be needed; None: all."""
        return None if self.mask is not None else max(self.before, default=0)

    def attend(self, q_BHSE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor) -> Tensor:
        """softmax(q k^T / sqrt(E)) v, [B, H, S, E]. If there are more keys than needed, the last ones are used."""
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
            from torch.nn.attention.varlen import varlen_attn

            # Use the sequence length, not the longest document's, so that compiled code gets the same value in all batches.
            longest, grouped = k_BKSE.shape[2], q_THE.shape[1] != k_TKE.shape[1]
            a_THE = varlen_attn(q_THE, k_TKE, v_TKE, *starts, longest, longest, window_size=(-1, 0), enable_gqa=grouped)
            assert isinstance(a_THE, Tensor), "varlen_attn returns one tensor unless asked for more"
        else:
            # One document after another; the first one in each sequence has `before` more keys than queries.
            sizes = list(itertools.chain(*self.lengths))
            key_sizes = list(itertools.chain(*_with_keys_before(self.lengths, before)))
            cuts = ((q_THE, sizes), (k_TKE, key_sizes), (v_TKE, key_sizes))
            queries, keys, values = ([x.transpose(0, 1)[None] for x in whole.split(parts)] for whole, parts in cuts)
            attended = [causal(q, k, v) for q, k, v in zip(queries, keys, values, strict=True)]
            a_THE = torch.cat([a[0].transpose(0, 1) for a in attended])
        return a_THE.unflatten(0, (q_BHSE.shape[0], -1)).transpose(1, 2)


def _with_keys_before(lengths: Sequence[Sequence[int]], before: Sequence[int]) -> Lengths:
    """Number of keys for each document, by sequence."""
    return tuple((first + more, *rest) for (first, *rest), more in zip(lengths, before, strict=True))


def _last_tokens(x_BKSE: Tensor, needed: Sequence[int]) -> Tensor:
    """The last `needed` tokens in each sequence, concatenated, [tokens, K, E]."""
    x_BSKE, length = x_BKSE.transpose(1, 2), x_BKSE.shape[2]
    if all(tokens == length for tokens in needed):
        return x_BSKE.flatten(0, 1)
    return torch.cat([row[length - tokens :] for row, tokens in zip(x_BSKE, needed, strict=True)])


def causal(q_BHSE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor) -> Tensor:
    """Causal softmax(q k^T / sqrt(E)) v, [B, H, S, E]. If there are fewer queries than keys, the queries belong to the last
    tokens."""
    tokens, keys = q_BHSE.shape[2], k_BKSE.shape[2]
    if tokens == keys:
        grouped = q_BHSE.shape[1] != k_BKSE.shape[1]
        return F.scaled_dot_product_attention(q_BHSE, k_BKSE, v_BKSE, is_causal=True, enable_gqa=grouped)
    if q_BHSE.device.type == "cuda" and q_BHSE.dtype in (torch.bfloat16, torch.float16):
        return last_queries(q_BHSE, k_BKSE, v_BKSE)
    return _padded(q_BHSE, k_BKSE, v_BKSE)


def last_queries(q_BHSE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor) -> Tensor:
    """`causal` on GPUs with fewer queries than keys: FlashAttention assigns the queries to the last tokens.

    Calls the kernel directly, because torch's API for it, `causal_lower_right`, creates a Tensor subclass, which is impossible in
    compiled code and under a dispatch mode (such as selective recomputation's). It also allocates host memory for tokens x keys.
    """
    # The kernel's conditions, written so that compiled code accepts them. ROCm's kernel assigns the queries to the first tokens.
    width, supported = q_BHSE.shape[3], torch.cuda.get_device_capability(q_BHSE.device) >= (8, 0)
    if width % 8 or width > 256 or not supported or torch.version.hip is not None:
        return _padded(q_BHSE, k_BKSE, v_BKSE)
    attended: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q_BHSE, k_BKSE, v_BKSE, is_causal=True)[0]
    return attended


def _padded(q_BHSE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor) -> Tensor:
    """`causal` for fewer queries than keys on any device."""
    grouped, tokens, keys = q_BHSE.shape[1] != k_BKSE.shape[1], q_BHSE.shape[2], k_BKSE.shape[2]
    if 2 * tokens < keys:
        return _causal_by_rows(q_BHSE, k_BKSE, v_BKSE)
    # Pad the queries at the front. This computes a third more scores than needed, but needs no mask of tokens x keys. The padding
    # follows the memory order, so that attention returns a result laid out by tokens.
    padded_BSHE = F.pad(q_BHSE.transpose(1, 2), (0, 0, 0, 0, keys - tokens, 0))
    attended = F.scaled_dot_product_attention(
        padded_BSHE.transpose(1, 2), k_BKSE, v_BKSE, is_causal=True, enable_gqa=grouped
    )
    return attended.narrow(2, keys - tokens, tokens)


_MASK_ROWS = 256
"""Number of queries that each mask covers."""


def _causal_by_rows(q_BHSE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor) -> Tensor:
    """`causal` for few queries: processes blocks of rows, each with a view of one shared mask."""
    tokens, keys, attended = q_BHSE.shape[2], k_BKSE.shape[2], []
    most = min(tokens, _MASK_ROWS)
    hidden = torch.ones(most, keys, dtype=torch.bool, device=q_BHSE.device).triu(keys - most + 1)
    mask = torch.zeros(most, keys, dtype=q_BHSE.dtype, device=q_BHSE.device).masked_fill_(hidden, -math.inf)
    for start in range(0, tokens, most):
        rows = min(most, tokens - start)
        seen = keys - tokens + start + rows
        q, k, v = q_BHSE.narrow(2, start, rows), k_BKSE.narrow(2, 0, seen), v_BKSE.narrow(2, 0, seen)
        of_rows = mask.narrow(0, most - rows, rows).narrow(1, keys - seen, seen)
        grouped = q.shape[1] != k.shape[1]
        attended.append(F.scaled_dot_product_attention(q, k, v, attn_mask=of_rows, enable_gqa=grouped))
    # Concatenate along tokens in memory, which is the layout of each block.
    return torch.cat([a.transpose(1, 2) for a in attended], dim=1).transpose(1, 2)


def documents_of(document_ids_BS: Tensor, device: torch.device, dtype: torch.dtype, compiled: bool) -> Documents | None:
    """Builds the documents, runs of equal ids. The host reads the ids, so they need not be on the device.

    Returns None if each sequence is one document, so that plain causal attention is enough; compiled code on CPUs skips this
    check.
    """
    form = document_form(device.type, str(dtype)[6:], compiled)
    runs = (torch.unique_consecutive(row_S, return_counts=True)[1] for row_S in document_ids_BS.cpu())
    lengths = tuple(tuple(row_N.tolist()) for row_N in runs)
    if form == "mask":
        return Documents(form, lengths, mask=_mask(document_ids_BS.to(device, non_blocking=True), dtype))
    if all(len(sequence) == 1 for sequence in lengths):
        return None
    return Documents(form, lengths, _starts(lengths, device) if form == "varlen" else None)


def _starts(lengths: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    ends = list(itertools.accumulate(itertools.chain(*lengths), initial=0))
    size = 1 << (len(ends) - 1).bit_length()
    return torch.tensor([*ends, *[ends[-1]] * (size - len(ends))], dtype=torch.int32).to(device, non_blocking=True)


def _mask(document_ids_BS: Tensor, dtype: torch.dtype) -> Tensor:
    runs_BS = F.pad(document_ids_BS.diff(dim=1) != 0, (1, 0)).cumsum(1)  # the same id may come again
    same = runs_BS[:, None, :, None] == runs_BS[:, None, None, :]
    allowed = same & same.new_ones(same.shape[-2:]).tril()
    # Use the activations' dtype: every block would convert a boolean mask and save the result.
    return torch.zeros(allowed.shape, dtype=dtype, device=same.device).masked_fill_(~allowed, -math.inf)
