"""Causal attention over the local heads: from projections to heads with rotary embeddings, attention, and key/value caches for
generation.

Legend: B sequences, S tokens in each, T = B * S, H query heads and K key/value heads on this process, E head width; O local outputs
of a projection; cp processes on the context axis, c tokens in a chunk; C cached tokens in the longest sequence.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from boost.config import architecture
from boost.config.attention import chunks_of
from boost.config.schema import ModelConfig
from boost.models.documents import Documents, causal, documents_of
from boost.models.fused import FusedModule, Sharding
from boost.models.kernels import STATISTIC_DTYPE, Kernel, Node, normed_backward, rotary

KeysValues = tuple[Tensor, Tensor] | tuple[()]
"""Rotated keys and values [B, K, S, E] of the first half of each sequence, used by the second half; empty if not needed."""


@dataclass(frozen=True)
class SequenceShare:
    """This process's share of each sequence on the context axis (`boost.config.attention`): two chunks, one from each
    half of the sequence, or only the chunk from one half."""

    rank: int
    cp: int
    gathers_keys: bool
    """Whether keys and values are gathered while queries stay local. Otherwise, attention gets all tokens of some heads."""
    documents: tuple[Documents | None, ...] = (None, None)
    """Documents of the queries in each local chunk, if keys are gathered."""
    halves_held: tuple[int, ...] = (0, 1)
    """Halves of the sequence that this share covers: 0 the first, 1 the second."""

    @property
    def chunks(self) -> list[int]:
        """Indices of the local chunks."""
        both = chunks_of(self.rank, self.cp)
        return [both[half] for half in self.halves_held]

    def halves(self) -> "tuple[SequenceShare, SequenceShare]":
        """Shares of the first half and of the second half of the sequence."""
        first, second = (
            replace(self, documents=(own,), halves_held=(half,)) for half, own in enumerate(self.documents)
        )
        return first, second

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """Positions of the `tokens` local tokens in a sequence, int64."""
        c = tokens // len(self.chunks)
        return torch.cat([torch.arange(number * c, (number + 1) * c, device=device) for number in self.chunks])

    def to_sequences(self, x: Tensor, batch: int) -> Tensor:
        """Reorders rows from process order (one process after another) to sequence order. Copies unless the orders are equal."""
        held, cp = len(self.halves_held), self.cp
        places = [(i, half, place) for i, half in enumerate(self.halves_held) for place in range(cp)]
        order = [(self._mirrored(p, half) * batch + b) * held + i for b in range(batch) for i, half, p in places]
        return _reordered(x, order)

    def to_processes(self, x: Tensor, batch: int) -> Tensor:
        """Inverse of `to_sequences`. Its order is computed directly: torch.compile cannot sort indices if `batch` is dynamic."""
        held, cp = len(self.halves_held), self.cp
        rows = [(b, i, half) for b in range(batch) for i, half in enumerate(self.halves_held)]
        return _reordered(x, [(b * held + i) * cp + self._mirrored(r, half) for r in range(cp) for b, i, half in rows])

    def _mirrored(self, rank: int, half: int) -> int:
        """The process that holds chunk `rank` of a half, and vice versa: second halves are assigned in reverse order."""
        return rank if half == 0 else self.cp - 1 - rank


def _reordered(x: Tensor, order: Sequence[int]) -> Tensor:
    if list(order) == list(range(len(order))):
        return x
    blocks = x.split(x.shape[0] // len(order))
    return torch.cat([blocks[number] for number in order])


@dataclass
class KVCache:
    """Keys and values for the tokens that one block has processed during generation, [B, K, capacity, E]; filled in place."""

    keys: Tensor
    values: Tensor
    length: int = 0
    """Number of cached tokens in each sequence."""

    def extend(self, k_BKSE: Tensor, v_BKSE: Tensor) -> tuple[Tensor, Tensor]:
        """Stores the keys and values of the next S tokens. Returns those of all tokens so far, [B, K, C, E], as views."""
        start, self.length = self.length, self.length + k_BKSE.shape[2]
        for x_BKSE, stored in ((k_BKSE, self.keys), (v_BKSE, self.values)):
            stored[:, :, start : self.length] = x_BKSE
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]


def attend_next(q_BH1E: Tensor, k_BKCE: Tensor, v_BKCE: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(E)) v, [B, H, 1, E], for the newest of C tokens.

    Query heads that share a key/value head become queries of that head, so that its keys are read once.
    """
    q_BKGE = q_BH1E.reshape(q_BH1E.shape[0], k_BKCE.shape[1], -1, q_BH1E.shape[-1])
    return F.scaled_dot_product_attention(q_BKGE, k_BKCE, v_BKCE).reshape(q_BH1E.shape)


@dataclass(frozen=True)
class Context:
    """A micro-batch's metadata for attention, the same for every block."""

    batch: int
    """Number of sequences B."""
    cos: Tensor
    """Cosines of the rotary angles in the activations' dtype, [S, 1, E]."""
    sin: Tensor
    """Sines of the angles, [S, 1, E / 2]: the two halves of a head have the same angles."""
    documents: Documents | None = None
    """Document boundaries: tokens attend only within their own document. None: they attend to the whole sequence so far."""
    caches: tuple[KVCache, ...] = ()
    """One cache per block during generation, else empty."""
    is_first_half: bool = False
    """Whether these are the first half of the tokens in a sequence, whose keys and values the second half needs."""
    attends_to_first_half: bool = False
    """Whether these are the second half of the tokens in a sequence."""
    share: SequenceShare | None = None
    """This process's share of each sequence, for whose positions the angles are computed. None: the whole sequence."""

    def halves(self) -> "list[Context]":
        """Contexts for the two halves: half of the sequences each, or half of the tokens in a single sequence."""
        if self.batch == 1:
            return self._halves_of_tokens()
        sizes = [-(-self.batch // 2), self.batch // 2]
        documents = _split(self.documents, sizes)
        shares = [self.share] * 2
        if self.share is not None:
            of_chunks = [_split(chunk, sizes) for chunk in self.share.documents]
            shares = [replace(self.share, documents=half) for half in zip(*of_chunks, strict=True)]
        halves = zip(sizes, documents, shares, strict=True)
        return [replace(self, batch=n, documents=own, share=share) for n, own, share in halves]

    def _halves_of_tokens(self) -> "list[Context]":
        held = self.cos.shape[0] // 2
        shares = (None, None) if self.share is None else self.share.halves()
        tokens = held if self.share is None else held * self.share.cp
        ends = (0, tokens), (tokens, 2 * tokens)
        documents = [None if self.documents is None else self.documents.part(*half) for half in ends]
        halves = zip(self.cos.split(held), self.sin.split(held), documents, shares, strict=True)
        first, second = (Context(1, cos, sin, own, share=share) for cos, sin, own, share in halves)
        return [replace(first, is_first_half=True), replace(second, attends_to_first_half=True)]


def _split(documents: Documents | None, sizes: Sequence[int]) -> "Sequence[Documents | None]":
    return [None] * len(sizes) if documents is None else documents.split(sizes)


def make_context(
    batch: int,
    positions: Tensor,
    model: ModelConfig,
    dtype: torch.dtype,
    document_ids_BS: Tensor | None = None,
    compiled: bool = False,
    share: SequenceShare | None = None,
) -> Context:
    """Builds the context for a micro-batch at these positions, [S].

    `document_ids_BS`: ids for whole sequences; tokens attend only within their own document. `compiled`: whether blocks
    are compiled, with one graph for all batches. `share`: the part of each sequence at these positions.

    Angles are computed in fp32 (fp64 for fp64 activations) regardless of `dtype`. Rotary positions are relative, so positions
    do not restart at each document.
    """
    acc_dtype = STATISTIC_DTYPE[dtype]
    half = positions.to(acc_dtype).unsqueeze(-1) * rotary_frequencies(model, acc_dtype, positions.device)
    half = half.unsqueeze(-2)  # the same for all heads
    cos, sin = half.cos().to(dtype), half.sin().to(dtype)
    documents = None
    if document_ids_BS is not None:
        documents = documents_of(document_ids_BS, positions.device, dtype, compiled)
    if documents is not None and share is not None and share.gathers_keys:
        c = positions.shape[0] // len(share.chunks)
        of_chunks = tuple(documents.part(number * c, (number + 1) * c) for number in share.chunks)
        share, documents = replace(share, documents=of_chunks), None
    return Context(batch, torch.cat((cos, cos), dim=-1), sin, documents, share=share)


def rotary_frequencies(model: ModelConfig, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Rotary frequencies [E / 2], in radians per token.

    With `model.rope_factor`, they are scaled as in Llama 3.1 (arXiv 2407.21783 and its published configuration): low
    frequencies are divided by the factor, high ones are unchanged, and frequencies in between are interpolated.
    """
    width = model.head_dim
    plain = model.rope_theta ** -(torch.arange(0, width, 2, device=device, dtype=dtype) / width)
    if model.rope_factor == 1:
        return plain
    turns = model.rope_original_len * plain / (2 * math.pi)
    unchanged = ((turns - model.rope_low_freq) / (model.rope_high_freq - model.rope_low_freq)).clamp(0, 1)
    return plain * (unchanged + (1 - unchanged) / model.rope_factor)


# From projections to heads.


class Heads:
    """The rest of a block's projections to heads: parameters of q, k, v that act on this process's heads, and rotary embeddings.
    Subclasses store the parameters."""

    q_bias: Tensor
    k_bias: Tensor
    v_bias: Tensor
    q_norm: Tensor
    k_norm: Tensor

    def __init__(self, model: ModelConfig, layer: int, layout: Sharding) -> None:
        self.head_dim, self.eps = model.head_dim, model.norm_eps
        self.has_biases, self.has_norms = model.attn_bias != "none", model.qk_norm
        self.has_rope = layer not in model.nope_layers
        own = own_head(model, layout)
        self.own_rows = None, own, own
        """For each of q, k, v, the (first row, rows) of its bias that this process uses; None: all rows."""

    def split(self, projected: Sequence[Tensor], context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Products of q, k, v, [T, O] each -> rotated q and k, and v, as heads [B, S, H or K, E]."""
        if self.has_biases:
            # Not in the GEMM: several layouts sum its products over processes, or exchange them.
            each = zip(projected, (self.q_bias, self.k_bias, self.v_bias), self.own_rows, strict=True)
            projected = [y + (b if own is None else b.narrow(0, *own)).to(y.dtype) for y, b, own in each]
        q, k, v = [y.view(context.batch, -1, y.shape[-1] // self.head_dim, self.head_dim) for y in projected]
        if self.has_norms:
            q, k = norm_heads(q, k, self.q_norm, self.k_norm, self.eps)
        if self.has_rope:
            q, k = rotary(q, k, context.cos, context.sin)
        return q, k, v


class FusedHeads(Heads, FusedModule):
    """The same, with parameters of its own."""

    def __init__(self, model: ModelConfig, layer: int, layout: Sharding) -> None:
        FusedModule.__init__(self)
        Heads.__init__(self, model, layer, layout)
        qkv, *_ = architecture.groups(model, layer)
        for parameter in architecture.attention_parameters(model, qkv, f"layers.{layer}"):
            self.add_fused_param("_".join(parameter.name.split(".")[-2:]), (parameter,), layout)


def own_head(model: ModelConfig, layout: Sharding) -> tuple[int, int] | None:
    """(first row, rows) of the one key/value head, among those of all, that this process uses; None: all local rows.

    If there are fewer heads K than processes p, all query heads of process i belong to head i K / p.
    """
    if model.kv_heads >= layout.num_shards:
        return None
    return layout.rank * model.kv_heads // layout.num_shards * model.head_dim, model.head_dim


@Kernel
def normed_heads(
    q_BSHE: Tensor, k_BSKE: Tensor, gamma_q_E: Tensor, gamma_k_E: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """RMSNorm of every head of q and k (qk-norm, arXiv 2302.05442) -> (both, rounded to their dtype once; 1 / RMS, [..., 1]). One
    device kernel for each of them."""
    dtype, made = STATISTIC_DTYPE[q_BSHE.dtype], []
    for x, gamma_E in ((q_BSHE, gamma_q_E), (k_BSKE, gamma_k_E)):
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype)
        c = torch.rsqrt(norm.square_().div_(x.shape[-1]).add_(eps))
        y = x * c * gamma_E
        made.append((y if y.dtype == x.dtype else y.to(x.dtype), c))
    (q, c_q), (k, c_k) = made
    return q, k, c_q, c_k


class _NormHeads(torch.autograd.Function):
    """forward: q [B, S, H, E], k [B, S, K, E], gamma_q, gamma_k [E] -> both normed over E (`boost.models.kernels.RMSNorm`).
    dgrad: dq, dk. wgrad: dgamma_q, dgamma_k, sums over tokens and heads. No collective.

    Saves q, k and 1 / RMS of both.
    """

    @staticmethod
    def forward(
        ctx: Node, q_BSHE: Tensor, k_BSKE: Tensor, gamma_q_E: Tensor, gamma_k_E: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        q, k, c_q, c_k = normed_heads(q_BSHE, k_BSKE, gamma_q_E, gamma_k_E, eps)
        ctx.save_for_backward(q_BSHE, k_BSKE, gamma_q_E, gamma_k_E, c_q, c_k)
        return q, k

    @staticmethod
    def backward(ctx: Node, dq_BSHE: Tensor, dk_BSKE: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        q_BSHE, k_BSKE, gamma_q_E, gamma_k_E, c_q, c_k = ctx.saved_tensors
        dq, dgamma_q = normed_backward(dq_BSHE, q_BSHE, gamma_q_E, c_q)
        dk, dgamma_k = normed_backward(dk_BSKE, k_BSKE, gamma_k_E, c_k)
        return dq, dk, dgamma_q, dgamma_k, None


def norm_heads(
    q_BSHE: Tensor, k_BSKE: Tensor, gamma_q_E: Tensor, gamma_k_E: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Differentiable RMSNorm of every head of q and k."""
    if not torch.is_grad_enabled():
        q, k, *_ = normed_heads(q_BSHE, k_BSKE, gamma_q_E, gamma_k_E, eps)
        return q, k
    made: tuple[Tensor, Tensor] = _NormHeads.apply(q_BSHE, k_BSKE, gamma_q_E, gamma_k_E, eps)
    return made


def split_heads(qkv_TO: Sequence[Tensor], head_dim: int, batch: int) -> list[Tensor]:
    """Queries, keys and values [T, width] as heads, [B, S, H or K, E]: views."""
    return [y_TO.view(batch, -1, y_TO.shape[-1] // head_dim, head_dim) for y_TO in qkv_TO]


def attend(
    q_BSHE: Tensor,
    k_BSKE: Tensor,
    v_BSKE: Tensor,
    context: Context,
    cache: KVCache | None = None,
    before: KeysValues = (),
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """softmax(q k^T / sqrt(E)) v for every local head, with q and k already rotated.

    Returns ([T, H * E], a list of keys and values for the second half of the sequence). For the second half, `before`
    holds the first half's keys and values.

    With a context axis, each local head has all tokens if heads were exchanged. If keys were gathered, there are more
    keys than queries, and the queries come from the local chunks.
    """
    q, k, v = q_BSHE.transpose(1, 2), k_BSKE.transpose(1, 2), v_BSKE.transpose(1, 2)
    if cache is not None:
        k, v = cache.extend(k, v)
    keys_values = [(k, v)] if context.is_first_half else []
    documents, share = context.documents, context.share
    if before:
        length = before[0].shape[2]
        tokens = None if documents is None else documents.tokens_before
        tokens = length if tokens is None else tokens
        k, v = (
            torch.cat((x.narrow(2, length - tokens, tokens), y), dim=2) for x, y in zip(before, (k, v), strict=True)
        )
    if share is not None and share.gathers_keys:
        a = _attend_chunks(q, k, v, share)
    elif documents is not None:
        a = documents.attend(q, k, v)
    elif cache is not None and q.shape[2] == 1:
        a = attend_next(q, k, v)
    elif q.shape[2] == k.shape[2]:
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    else:
        a = causal(q, k, v)
    batch, tokens, heads, head_dim = q_BSHE.shape
    return a.transpose(1, 2).reshape(batch * tokens, heads * head_dim), keys_values


def _attend_chunks(q_BHSE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, share: SequenceShare) -> Tensor:
    """Attention from the local chunks' queries to the sequence's keys, up to each query's position."""
    c, attended = q_BHSE.shape[2] // len(share.chunks), []
    for index, (number, documents) in enumerate(zip(share.chunks, share.documents, strict=True)):
        end = (number + 1) * c
        q, k, v = q_BHSE.narrow(2, index * c, c), k_BKSE.narrow(2, 0, end), v_BKSE.narrow(2, 0, end)
        attended.append(causal(q, k, v) if documents is None else documents.attend(q, k, v))
    if len(attended) == 1:
        return attended[0]
    return torch.cat([a.transpose(1, 2) for a in attended], dim=1).transpose(1, 2)
