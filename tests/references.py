"""Hand-written references of every family from the papers, in plain PyTorch, which boost's decoder must match. They share no code
with it, shard nothing, and write out each linear, head and latent. Weights are passed by mathematical name, and what is there
decides: biases, the norms of queries and keys (`attn.q.norm`), a head of its own.

    dense, svd, cola, bottleneck(act), gated, lost(low, sparse, act), lax(over, gate), cr_net:
        (weights, shape, tokens, documents) -> logits

Legend: B sequences, S tokens, d residual width, H query heads, K key/value heads, E width of a head, r rank of one linear,
a x b its most balanced factors, k input channels that LOST selects, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
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

    def biased(layer: int, name: str, x: Tensor) -> Tensor:
        return linear(layer, name, x) + w.get(f"layers.{layer}.{name}.bias", torch.zeros(()))

    x_BSd = w["embed"][tokens_BS]
    for layer in range(layers):
        z = rms_norm(x_BSd, w[f"layers.{layer}.attn_norm"], shape.norm_eps)
        q, k, v = (biased(layer, f"attn.{name}", z) for name in "qkv")
        gains = [w.get(f"layers.{layer}.attn.{name}.norm") for name in "qk"]
        x_BSd = x_BSd + biased(layer, "attn.o", attention(q, k, v, shape, documents_BS, gains))
        z = rms_norm(x_BSd, w[f"layers.{layer}.mlp_norm"], shape.norm_eps)
        gate, up = linear(layer, "mlp.gate", z), linear(layer, "mlp.up", z)
        x_BSd = x_BSd + linear(layer, "mlp.down", (silu(gate) if shape.mlp_silu else gate) * up)
    return rms_norm(x_BSd, w["final_norm"], shape.norm_eps) @ w.get("head", w["embed"]).T


def loss_and_gradients(
    reference: Reference,
    w: Weights,
    shape: Shape,
    tokens_BS: Tensor,
    targets_BS: Tensor,
    documents_BS: Tensor | None = None,
) -> tuple[Tensor, Weights]:
    """Cross entropy, summed over all tokens, and its gradients; indices have none."""
    leaves = {name: value.clone().requires_grad_(value.is_floating_point()) for name, value in w.items()}
    logits_BSV = reference(leaves, shape, tokens_BS, documents_BS)
    loss = -logits_BSV.log_softmax(-1).gather(-1, targets_BS[..., None]).sum()
    loss.backward()
    return loss.detach(), {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def rms_norm(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """x over the root of its mean square, times gamma."""
    return gamma * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shape: Shape,
    documents_BS: Tensor | None,
    gains: Sequence[Tensor | None] = (None, None),
) -> Tensor:
    """Causal attention, one head at a time; each key/value head serves H / K consecutive query heads. `gains`: of the RMSNorm of
    each head of q and k (arXiv 2302.05442), if there are any."""
    length, width = q.shape[1], q.shape[2] // shape.heads
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    if documents_BS is not None:
        seen = seen & (documents_BS.unsqueeze(2) == documents_BS.unsqueeze(1))

    def head_of(x: Tensor, head: int, gain: Tensor | None) -> Tensor:
        x_BSE = x[..., head * width : (head + 1) * width]
        return rotary(x_BSE if gain is None else rms_norm(x_BSE, gain, shape.norm_eps), shape.rope_theta)

    outputs = []
    for head in range(shape.heads):
        kv = head * shape.kv_heads // shape.heads
        scores = head_of(q, head, gains[0]) @ head_of(k, kv, gains[1]).transpose(1, 2) / math.sqrt(width)
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


def weights_of(w: Weights, layer: int, name: str) -> Weights:
    """Weights of one linear, by the last part of their names."""
    start = f"layers.{layer}.{name}."
    return {key.removeprefix(start): value for key, value in w.items() if key.startswith(start)}


def bottleneck(act: Callable[[Tensor], Tensor]) -> Reference:
    """y = B act(A x)."""

    def run(w: Weights, shape: Shape, tokens_BS: Tensor, documents_BS: Tensor | None = None) -> Tensor:
        def linear(layer: int, name: str, x: Tensor) -> Tensor:
            own = weights_of(w, layer, name)
            return act(x @ own["A"].T) @ own["B"].T

        return llama(w, shape, tokens_BS, documents_BS, linear)

    return run


def cola(w: Weights, shape: Shape, tokens_BS: Tensor, documents_BS: Tensor | None = None) -> Tensor:
    """y = B silu(A x) (CoLA, arXiv 2502.10940)."""
    return bottleneck(silu)(w, shape, tokens_BS, documents_BS)


def gated(w: Weights, shape: Shape, tokens_BS: Tensor, documents_BS: Tensor | None = None) -> Tensor:
    """y = B (silu(A x) * (G x)): SwiGLU (arXiv 2002.05202) on the latents of each linear."""

    def linear(layer: int, name: str, x: Tensor) -> Tensor:
        own = weights_of(w, layer, name)
        return (silu(x @ own["A"].T) * (x @ own["G"].T)) @ own["B"].T

    return llama(w, shape, tokens_BS, documents_BS, linear)


def lost(low: float, sparse: float, act: Callable[[Tensor], Tensor]) -> Reference:
    """y = low B act(A x) + sparse S x[index], S [out, k] (LOST, arXiv 2508.02668, whose weights are gamma and 1 - gamma)."""

    def run(w: Weights, shape: Shape, tokens_BS: Tensor, documents_BS: Tensor | None = None) -> Tensor:
        def linear(layer: int, name: str, x: Tensor) -> Tensor:
            own = weights_of(w, layer, name)
            return low * (act(x @ own["A"].T) @ own["B"].T) + sparse * (x[..., own["index"]] @ own["S"].T)

        return llama(w, shape, tokens_BS, documents_BS, linear)

    return run


def cr_net(w: Weights, shape: Shape, tokens_BS: Tensor, documents_BS: Tensor | None = None) -> Tensor:
    """y = W x in the first block; after it y = sign(b) (|b| + 1e-6) y' + B A x, where b (`beta`) is one number per linear and y' is
    the output of the same linear in the previous block, without its bias (CR-Net, arXiv 2509.18993)."""
    before: dict[str, Tensor] = {}

    def linear(layer: int, name: str, x: Tensor) -> Tensor:
        own = weights_of(w, layer, name)
        if layer == 0:
            before[name] = x @ own["W"].T
        else:
            scale = own["beta"].sign() * (own["beta"].abs() + 1e-6)
            before[name] = scale * before[name] + x @ own["A"].T @ own["B"].T
        return before[name]

    return llama(w, shape, tokens_BS, documents_BS, linear)


def lax(over: str, gate: str) -> Reference:
    """u = A x; after the first block, u = LayerNorm(u + G(h of the same linear in the previous block)); h = act(u), y = B h
    (LaX, arXiv 2505.21732). over: svd (act is the identity) or cola (silu); gate: identity, tensor or dense."""

    def run(w: Weights, shape: Shape, tokens_BS: Tensor, documents_BS: Tensor | None = None) -> Tensor:
        before: dict[str, Tensor] = {}

        def linear(layer: int, name: str, x: Tensor) -> Tensor:
            own = weights_of(w, layer, name)
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
