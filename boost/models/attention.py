"""Rotary causal attention over the heads that this process holds.

Legend: B sequences, S tokens of each, T = B * S, H query heads and K key/value heads held here, E width of a head.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from boost.models.documents import Documents, documents_of
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


def make_context(
    batch: int,
    positions_S: Tensor,
    head_dim: int,
    theta: float,
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
    frequencies = theta ** -(torch.arange(0, head_dim, 2, device=positions_S.device, dtype=acc_dtype) / head_dim)
    angles = torch.outer(positions_S.to(acc_dtype), frequencies).repeat(1, 2)
    documents = None
    if document_ids_BS is not None:
        documents = documents_of(document_ids_BS, positions_S.device, dtype, compiled)
    return Context(batch, angles.cos().to(dtype), angles.sin().to(dtype), documents)


def attend(q_TO: Tensor, k_TO: Tensor, v_TO: Tensor, head_dim: int, context: Context, layer_index: int) -> Tensor:
    """softmax(q k^T / sqrt(E)) v for every head held here: [T, H * E], [T, K * E] twice -> [T, H * E]."""
    q, k, v = (y.view(context.batch, -1, y.shape[-1] // head_dim, head_dim) for y in (q_TO, k_TO, v_TO))
    q, k = rotary(q, context.cos, context.sin), rotary(k, context.cos, context.sin)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    first = True
    if context.caches:
        first = context.caches[layer_index].length == 0
        k, v = context.caches[layer_index].append(k, v)
    assert first or q.shape[2] == 1, "a cache that is not empty takes one token at a time"
    documents = context.documents
    if documents is not None and documents.mask is None:
        return documents.attend(q, k, v)
    mask = None if documents is None else documents.mask
    a = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=first and mask is None, enable_gqa=q.shape[1] != k.shape[1]
    )
    return a.transpose(1, 2).reshape(q_TO.shape)
