"""Hand-written references of every family from the papers, in plain PyTorch, which boost's decoder must match. They share no code
with it, shard nothing, and write out each linear, head and latent. Weights are passed by mathematical name.

    dense, svd, cola, lax(over, gate):  (weights, shape, tokens, documents) -> logits

Legend: B sequences, S tokens, d residual width, H query heads, K key/value heads, E width of a head, r rank of one linear,
a x b its most balanced factors, V vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

Weights = dict[str, Tensor]
Linear = Callable[[int, str, Tensor], Tensor]
"""(block, name of the linear, its input) -> its output."""
Reference = Callable[[Weights, "Shape", Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class Shape:
    """Model properties that the weights do not determine."""

    heads: int
    kv_heads: int
    norm_eps: float
    rope_theta: float
    mlp_silu: bool = True


def llama(w: Weights, shape: Shape, tokens_BS: Tensor, documents_BS: Tensor | None, linear: Linear) -> Tensor:
    """LLaMA (arXiv 2302.13971) with `linear` as each of the seven linears of a block: logits [B, S, V]."""
    layers = 1 + max(int(name.split(".")[1]) for name in w if name.startswith("layers."))
    x_BSd = w["embed"][tokens_BS]
    for layer in range(layers):
        z = rms_norm(x_BSd, w[f"layers.{layer}.attn_norm"], shape.norm_eps)
        q, k, v = (linear(layer, f"attn.{name}", z) for name in "qkv")
        x_BSd = x_BSd + linear(layer, "attn.o", attention(q, k, v, shape, documents_BS))
        z = rms_norm(x_BSd, w[f"layers.{layer}.mlp_norm"], shape.norm_eps)
        gate, up = linear(layer, "mlp.gate", z), linear(layer, "mlp.up", z)
        x_BSd = x_BSd + linear(layer, "mlp.down", (silu(gate) if shape.mlp_silu else gate) * up)
    return rms_norm(x_BSd, w["final_norm"], shape.norm_eps) @ w["head"].T


def rms_norm(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """x over the root of its mean square, times gamma."""
    return gamma * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def attention(q: Tensor, k: Tensor, v: Tensor, shape: Shape, documents_BS: Tensor | None) -> Tensor:
    """Causal attention, one head at a time; each key/value head serves H / K consecutive query heads."""
    length, width = q.shape[1], q.shape[2] // shape.heads
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    if documents_BS is not None:
        seen = seen & (documents_BS.unsqueeze(2) == documents_BS.unsqueeze(1))
    outputs = []
    for head in range(shape.heads):
        kv = head * shape.kv_heads // shape.heads
        q_BSE = rotary(q[..., head * width : (head + 1) * width], shape.rope_theta)
        k_BSE = rotary(k[..., kv * width : (kv + 1) * width], shape.rope_theta)
        scores = q_BSE @ k_BSE.transpose(1, 2) / math.sqrt(width)
        weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
        outputs.append(weights @ v[..., kv * width : (kv + 1) * width])
    return torch.cat(outputs, dim=-1)


def rotary(x_BSE: Tensor, theta: float) -> Tensor:
    """Rotates pair (i, i + E/2) of a head by position x theta^(-2i/E) (RoFormer, in LLaMA's rotate-half order)."""
    length, half = x_BSE.shape[1], x_BSE.shape[2] // 2
    angle = torch.arange(length, dtype=x_BSE.dtype)[:, None] * theta ** (-torch.arange(half, dtype=x_BSE.dtype) / half)
    x, y = x_BSE[..., :half], x_BSE[..., half:]
    return torch.cat((x * angle.cos() - y * angle.sin(), x * angle.sin() + y * angle.cos()), dim=-1)


def dense(w: Weights, shape: Shape, tokens_BS: Tensor, documents_BS: Tensor | None = None) -> Tensor:
    """y = W x."""

    def linear(layer: int, name: str, x: Tensor) -> Tensor:
        return x @ w[f"layers.{layer}.{name}.W"].T

    return llama(w, shape, tokens_BS, documents_BS, linear)


def svd(w: Weights, shape: Shape, tokens_BS: Tensor, documents_BS: Tensor | None = None) -> Tensor:
    """y = B A x: the dense model with W = B A."""
    names = {name.removesuffix(".A") for name in w if name.endswith(".A")}
    products = {f"{name}.W": w[f"{name}.B"] @ w[f"{name}.A"] for name in names}
    return dense(w | products, shape, tokens_BS, documents_BS)


def cola(w: Weights, shape: Shape, tokens_BS: Tensor, documents_BS: Tensor | None = None) -> Tensor:
    """y = B silu(A x) (CoLA, arXiv 2502.10940)."""

    def linear(layer: int, name: str, x: Tensor) -> Tensor:
        return silu(x @ w[f"layers.{layer}.{name}.A"].T) @ w[f"layers.{layer}.{name}.B"].T

    return llama(w, shape, tokens_BS, documents_BS, linear)


def lax(over: str, gate: str) -> Reference:
    """u = A x; after the first block, u = LayerNorm(u + G(h of the same linear in the previous block)); h = act(u), y = B h
    (LaX, arXiv 2505.21732). over: svd (act is the identity) or cola (silu); gate: identity, tensor or dense."""

    def run(w: Weights, shape: Shape, tokens_BS: Tensor, documents_BS: Tensor | None = None) -> Tensor:
        before: dict[str, Tensor] = {}

        def linear(layer: int, name: str, x: Tensor) -> Tensor:
            own = {key.rpartition(".")[2]: w[key] for key in w if key.startswith(f"layers.{layer}.{name}.")}
            u = x @ own["A"].T
            if layer > 0:
                u = layer_norm(u + passed(before[name], gate, own), own["norm_weight"], own["norm_bias"])
            before[name] = silu(u) if over == "cola" else u
            return before[name] @ own["B"].T

        return llama(w, shape, tokens_BS, documents_BS, linear)

    return run


def passed(h: Tensor, gate: str, own: Weights) -> Tensor:
    """G(h) of one latent [..., r]."""
    if gate == "dense":
        return h @ own["gate_weight"].T + own["gate_bias"]
    if gate == "tensor":
        a = max(n for n in range(1, math.isqrt(h.shape[-1]) + 1) if h.shape[-1] % n == 0)
        table = h.reshape(*h.shape[:-1], a, h.shape[-1] // a)
        # Both indices of the table are mixed: entry (i, j) is the sum of R_ik C_jl over all (k, l).
        return torch.einsum("ik,jl,...kl->...ij", own["gate_rows"], own["gate_columns"], table).reshape(h.shape)
    return h


def layer_norm(u: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """(u - mean) / standard deviation, followed by an affine map."""
    centered = u - u.mean(-1, keepdim=True)
    return weight * centered / torch.sqrt((centered * centered).mean(-1, keepdim=True) + 1e-6) + bias
