"""Rotary causal attention over the heads that this process holds.

Legend: B sequences, S tokens of each, T = B * S, H query heads and K key/value heads held here, E width of a head.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from boost.config.schema import ModelConfig
from boost.models.documents import Documents, causal, documents_of
from boost.models.pointwise import rotary
from boost.models.sequence_share import SequenceShare


@dataclass
class KVCache:
    """Keys and values of the tokens that one block has seen, [B, K, capacity, E]; grown in place while generating."""

    keys: Tensor
    values: Tensor
    length: int = 0

    def append(self, k_BKSE: Tensor, v_BKSE: Tensor) -> tuple[Tensor, Tensor]:
        """Appends new tokens and returns all of them."""
        end = self.length + k_BKSE.shape[2]
        self.keys[:, :, self.length : end] = k_BKSE
        self.values[:, :, self.length : end] = v_BKSE
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]


KeysValues = tuple[Tensor, ...]
"""Rotated keys and values [B, K, S, E] of the first half of each sequence, for the second; or nothing."""


@dataclass(frozen=True)
class Context:
    """What attention needs to know of a micro-batch, the same for every block."""

    batch: int
    """B."""
    cos: Tensor
    """[S, E], of the tokens' positions, in the activations' dtype."""
    sin: Tensor
    documents: Documents | None = None
    """Tokens attend to earlier tokens of their own document only; None: to all earlier tokens of the sequence."""
    caches: tuple[KVCache, ...] = ()
    """One a block while generating, else empty."""
    before: list[KeysValues] | None = None
    """Of the half of the sequence before this one, in the order of blocks: each block takes one. None: nothing is before."""
    after: list[KeysValues] | None = None
    """Where each block leaves its keys and values for the half after this one. None: nobody takes them."""
    share: SequenceShare | None = None
    """What this process holds of each sequence, of which the angles are; None: all of it."""

    def halves(self) -> "list[Context]":
        """Of the two halves of the sequences, or of the tokens of one sequence."""
        if self.batch == 1:
            return self._halves_of_tokens()
        sizes = [-(-self.batch // 2), self.batch // 2]
        documents = _split(self.documents, sizes)
        shares = [self.share] * 2
        if self.share is not None:
            of_chunks = [_split(each, sizes) for each in self.share.documents]
            shares = [self.share.of_sequences(each) for each in zip(*of_chunks, strict=True)]
        each = zip(sizes, documents, shares, strict=True)
        return [replace(self, batch=n, documents=found, share=share) for n, found, share in each]

    def _halves_of_tokens(self) -> "list[Context]":
        held = self.cos.shape[0] // 2
        shares = (None, None) if self.share is None else self.share.halves()
        tokens = held if self.share is None else held * self.share.cp
        ends = (0, tokens), (tokens, 2 * tokens)
        documents = [None if self.documents is None else self.documents.part(*each) for each in ends]
        angles = zip(self.cos.split(held), self.sin.split(held), strict=True)
        each = zip(angles, documents, shares, strict=True)
        first, second = (Context(1, *of_half, found, share=share) for of_half, found, share in each)
        passed: list[KeysValues] = []
        return [replace(first, after=passed), replace(second, before=passed)]

    def take(self) -> KeysValues:
        """What the half before this one left for the block that asks."""
        return self.before.pop(0) if self.before is not None else ()

    def leave(self, found: KeysValues) -> None:
        """Leaves this block's keys and values for the half after this one."""
        if self.after is not None:
            self.after.append(found)


def _split(documents: Documents | None, sizes: Sequence[int]) -> "Sequence[Documents | None]":
    return [None] * len(sizes) if documents is None else documents.split(sizes)


def make_context(
    batch: int,
    positions_S: Tensor,
    model: ModelConfig,
    dtype: torch.dtype,
    document_ids_BS: Tensor | None = None,
    compiled: bool = False,
    share: SequenceShare | None = None,
) -> Context:
    """The context of a micro-batch; with document ids, those of whole sequences, tokens attend to earlier tokens of their own
    document only. `compiled`: blocks are compiled, one graph for all batches. `share`: what of each sequence has these positions.

    Angles are computed in fp32 (fp64 for fp64 activations) whatever `dtype` is. Rotary positions are relative, so documents
    need no positions of their own.
    """
    acc_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    angles = torch.outer(positions_S.to(acc_dtype), rotary_frequencies(model, acc_dtype, positions_S.device)).repeat(
        1, 2
    )
    documents = None
    if document_ids_BS is not None:
        documents = documents_of(document_ids_BS, positions_S.device, dtype, compiled)
    if documents is not None and share is not None and share.gathers_keys:
        c = positions_S.shape[0] // len(share.chunks)
        each = [documents.part(number * c, (number + 1) * c) for number in share.chunks]
        share, documents = share.of_sequences(each), None
    return Context(batch, angles.cos().to(dtype), angles.sin().to(dtype), documents, share=share)


def rotary_frequencies(model: ModelConfig, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Angles a token [E / 2], in radians. With `model.rope_factor` as Llama 3.1 has them (arXiv 2407.21783, and its published
    configuration): slow rotations are slower by the factor, fast ones unchanged, and those between by a mean of both."""
    width = model.head_dim
    plain = model.rope_theta ** -(torch.arange(0, width, 2, device=device, dtype=dtype) / width)
    if model.rope_factor == 1:
        return plain
    turns = model.rope_original_len * plain / (2 * math.pi)
    unchanged = ((turns - model.rope_low_freq) / (model.rope_high_freq - model.rope_low_freq)).clamp(0, 1)
    return plain * (unchanged + (1 - unchanged) / model.rope_factor)


def rotated(q_TO: Tensor, k_TO: Tensor, head_dim: int, context: Context) -> tuple[Tensor, Tensor]:
    """Queries and keys [T, width] with rotary positions."""
    q, k = (
        rotary(y.view(context.batch, -1, y.shape[-1] // head_dim, head_dim), context.cos, context.sin)
        for y in (q_TO, k_TO)
    )
    return q.reshape(q_TO.shape), k.reshape(k_TO.shape)


def attend(
    q_TO: Tensor,
    k_TO: Tensor,
    v_TO: Tensor,
    head_dim: int,
    context: Context,
    layer_index: int,
    before: KeysValues = (),
) -> tuple[Tensor, KeysValues]:
    """softmax(q k^T / sqrt(E)) v for every head held here, of rotated q and k: [T, H * E], [T, K * E] twice -> [T, H * E], and the
    keys and values that the second half of the sequence needs; of that half, `before` has those of the first.

    Of a sequence shared over the context axis, heads that crossed have all tokens; keys that were gathered have more than the
    queries, which are those of the chunks held here.
    """
    q, k, v = (y.view(context.batch, -1, y.shape[-1] // head_dim, head_dim).transpose(1, 2) for y in (q_TO, k_TO, v_TO))
    first = True
    if context.caches:
        first = context.caches[layer_index].length == 0
        k, v = context.caches[layer_index].append(k, v)
    assert first or q.shape[2] == 1, "a cache that is not empty takes one token at a time"
    found = (k, v) if context.after is not None else ()
    documents, share = context.documents, context.share
    if before:
        k, v = _prepended(before, k, v, None if documents is None else documents.tokens_before)
    if share is not None and share.gathers_keys:
        a = _attend_chunks(q, k, v, share)
    elif documents is not None:
        a = documents.attend(q, k, v)
    elif not first:
        a = F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])
    else:
        a = causal(q, k, v)
    return a.transpose(1, 2).reshape(q_TO.shape), found


def _attend_chunks(q_BHSE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, share: SequenceShare) -> Tensor:
    """Of queries of the chunks held here, to the keys up to their own, from the first of the sequence on."""
    c, found = q_BHSE.shape[2] // len(share.chunks), []
    for index, (number, documents) in enumerate(zip(share.chunks, share.documents, strict=True)):
        end = (number + 1) * c
        q, k, v = q_BHSE.narrow(2, index * c, c), k_BKSE.narrow(2, 0, end), v_BKSE.narrow(2, 0, end)
        found.append(causal(q, k, v) if documents is None else documents.attend(q, k, v))
    if len(found) == 1:
        return found[0]
    return torch.cat([a.transpose(1, 2) for a in found], dim=1).transpose(1, 2)


def _prepended(before: KeysValues, k: Tensor, v: Tensor, tokens: int | None) -> Sequence[Tensor]:
    """Keys and values after the last `tokens` of those before them; None: after all of them."""
    length = before[0].shape[2]
    tokens = length if tokens is None else tokens
    each = zip(before, (k, v), strict=True)
    return [torch.cat((x.narrow(2, length - tokens, tokens), y), dim=2) for x, y in each]
