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

    def halves(self) -> "list[Context]":
        """Of the two halves of the sequences, or of the tokens of one sequence."""
        if self.batch == 1:
            return self._halves_of_tokens()
        sizes = [-(-self.batch // 2), self.batch // 2]
        documents = [None, None] if self.documents is None else self.documents.split(sizes)
        return [replace(self, batch=n, documents=each) for n, each in zip(sizes, documents, strict=True)]

    def _halves_of_tokens(self) -> "list[Context]":
        tokens = self.cos.shape[0] // 2
        documents = (None, None) if self.documents is None else self.documents.split_tokens(tokens)
        angles = zip(self.cos.split(tokens), self.sin.split(tokens), strict=True)
        first, second = (Context(1, *each, found) for each, found in zip(angles, documents, strict=True))
        passed: list[KeysValues] = []
        return [replace(first, after=passed), replace(second, before=passed)]

    def take(self) -> KeysValues:
        """What the half before this one left for the block that asks."""
        return self.before.pop(0) if self.before is not None else ()

    def leave(self, found: KeysValues) -> None:
        """Leaves this block's keys and values for the half after this one."""
        if self.after is not None:
            self.after.append(found)


def make_context(
    batch: int,
    positions_S: Tensor,
    model: ModelConfig,
    dtype: torch.dtype,
    document_ids_BS: Tensor | None = None,
    compiled: bool = False,
) -> Context:
    """The context of a micro-batch; with document ids, tokens attend to earlier tokens of their own document only. `compiled`:
    blocks are compiled, one graph for all batches.

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
    return Context(batch, angles.cos().to(dtype), angles.sin().to(dtype), documents)


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


def attend(
    q_TO: Tensor,
    k_TO: Tensor,
    v_TO: Tensor,
    head_dim: int,
    context: Context,
    layer_index: int,
    before: KeysValues = (),
) -> tuple[Tensor, KeysValues]:
    """softmax(q k^T / sqrt(E)) v for every head held here: [T, H * E], [T, K * E] twice -> [T, H * E], and the keys and values
    that the second half of the sequence needs; of that half, `before` has those of the first."""
    q, k, v = (y.view(context.batch, -1, y.shape[-1] // head_dim, head_dim) for y in (q_TO, k_TO, v_TO))
    q, k = rotary(q, context.cos, context.sin), rotary(k, context.cos, context.sin)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    first = True
    if context.caches:
        first = context.caches[layer_index].length == 0
        k, v = context.caches[layer_index].append(k, v)
    assert first or q.shape[2] == 1, "a cache that is not empty takes one token at a time"
    found = (k, v) if context.after is not None else ()
    documents = context.documents
    if before:
        k, v = _prepended(before, k, v, None if documents is None else documents.before)
    if documents is not None and documents.mask is None:
        return documents.attend(q, k, v), found
    if documents is not None or not first:
        mask = None if documents is None else documents.mask
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    else:
        a = causal(q, k, v)
    return a.transpose(1, 2).reshape(q_TO.shape), found


def _prepended(before: KeysValues, k: Tensor, v: Tensor, tokens: int | None) -> Sequence[Tensor]:
    """Keys and values after the last `tokens` of those before them; None: after all of them."""
    length = before[0].shape[2]
    tokens = length if tokens is None else tokens
    each = zip(before, (k, v), strict=True)
    return [torch.cat((x.narrow(2, length - tokens, tokens), y), dim=2) for x, y in each]
