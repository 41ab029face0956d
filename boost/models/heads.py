"""From projections to heads: biases, RMSNorm of queries and keys (qk-norm, arXiv 2302.05442), and rotary embeddings.

Legend: B sequences, S tokens in each, T = B * S; H query heads and K key/value heads on this process, E head width; O local
outputs.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from boost.config import architecture
from boost.config.schema import ModelConfig
from boost.models.attention import Context, split_heads
from boost.models.fused import FusedModule, Sharding
from boost.models.kernels import Kernel, normed_backward, rotary


class Heads(FusedModule):
    """The rest of a block's projections to heads: parameters of q, k, v that act on this process's heads, and rotary embeddings."""

    q_bias: Tensor
    k_bias: Tensor
    v_bias: Tensor
    q_norm: Tensor
    k_norm: Tensor

    def __init__(self, model: ModelConfig, layer: int, layout: Sharding) -> None:
        super().__init__()
        self.head_dim, self.eps = model.head_dim, model.norm_eps
        self.has_biases, self.has_norms = model.attn_bias != "none", model.qk_norm
        self.has_rope = layer not in model.nope_layers
        own = own_head(model, layout)
        self.own_rows = None, own, own
        """For each of q, k, v, the (first row, rows) of its bias that this process uses; None: all rows."""
        qkv, *_ = architecture.groups(model, layer)
        for parameter in architecture.attention_parameters(model, qkv, f"layers.{layer}"):
            self.add_fused_param("_".join(parameter.name.split(".")[-2:]), (parameter,), layout)

    def split(self, projected: Sequence[Tensor], context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Products of q, k, v, [T, O] each -> rotated q and k, and v, as heads [B, S, H or K, E]."""
        if self.has_biases:
            # Not in the GEMM: several layouts sum its products over processes, or exchange them.
            each = zip(projected, (self.q_bias, self.k_bias, self.v_bias), self.own_rows, strict=True)
            projected = [y + (b if own is None else b.narrow(0, *own)).to(y.dtype) for y, b, own in each]
        q, k, v = split_heads(projected, self.head_dim, context.batch)
        if self.has_norms:
            q, k = norm_heads(q, k, self.q_norm, self.k_norm, self.eps)
        if self.has_rope:
            q, k = rotary(q, k, context.cos, context.sin)
        return q, k, v


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
    """RMSNorm of every head of q and k -> (both normed, rounded to their dtype once, 1 / RMS of both [B, S, H or K, 1])."""
    dtype, made = torch.float64 if q_BSHE.dtype == torch.float64 else torch.float32, []
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
        ctx: Any, q_BSHE: Tensor, k_BSKE: Tensor, gamma_q_E: Tensor, gamma_k_E: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        q, k, c_q, c_k = normed_heads(q_BSHE, k_BSKE, gamma_q_E, gamma_k_E, eps)
        ctx.save_for_backward(q_BSHE, k_BSKE, gamma_q_E, gamma_k_E, c_q, c_k)
        return q, k

    @staticmethod
    def backward(ctx: Any, dq_BSHE: Tensor, dk_BSKE: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
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
