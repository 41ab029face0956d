"""A decoder of every family in plain PyTorch, whose every module is called, and models that are trained three steps.

Its modules and parameters have the names of `boost.nn.Decoder`'s, whose weights it takes, so that the same change can be made to
both: a hook, an adapter, another module.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import boost
from boost.nn.weights import whole_weight
from tests import references

SIZES: dict[str, Any] = {"vocab_size": 64, "dim": 32, "ffn_dim": 48, "layers": 2, "heads": 8, "kv_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "dense": {"family": "dense"},
    "cola": {"family": "cola", "rank": 8},
    "lax": {"family": "lax", "rank": 8, "gate": "tensor"},
    "dense-heads": {"family": "dense", "attn_bias": "qkvo", "qk_norm": True},
    "cola-heads": {"family": "cola", "rank": 8, "attn_bias": "qkvo", "qk_norm": True},
    "lax-heads": {"family": "lax", "rank": 8, "gate": "tensor", "attn_bias": "qkvo", "qk_norm": True},
}
SHAPE = references.Shape(8, 2, 1e-6, 1e4)


def make(family: str, **more: Any) -> boost.nn.Decoder:
    return boost.nn.Decoder(**{"dtype": torch.float64, **SIZES, **FAMILIES[family], **more})


class Factors(nn.Module):
    """B act(A x), plus a bias if B has one."""

    def __init__(self, inputs: int, outputs: int, rank: int, activation: str, bias: bool) -> None:
        super().__init__()
        self.A, self.B = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=bias)
        self.activation = activation

    def act(self, u: Tensor) -> Tensor:
        return F.silu(u) if self.activation == "silu" else u

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.B(self.act(self.A(x)))
        return y


class Gate(nn.Module):
    """LayerNorm(u + G(h)) of each latent, with the tensor gate."""

    def __init__(self, slots: str, rank: int) -> None:
        super().__init__()
        self.slots, self.rank, shape = slots.split(), rank, (2, 4)
        for name in ("norm_weight", "norm_bias"):
            for slot in self.slots:
                self.register_parameter(f"{name}_{slot}", nn.Parameter(torch.empty(rank)))
        for name, size in zip(("gate_rows", "gate_columns"), shape, strict=True):
            for slot in self.slots:
                self.register_parameter(f"{name}_{slot}", nn.Parameter(torch.empty(size, size)))

    def forward(self, latents: Tensor, prev: Tensor) -> tuple[Tensor]:
        made = []
        for slot, u, h in zip(self.slots, latents.split(self.rank, -1), prev.split(self.rank, -1), strict=True):
            names = ("norm_weight", "norm_bias", "gate_rows", "gate_columns")
            weight, bias, rows, columns = (getattr(self, f"{name}_{slot}") for name in names)
            mixed = u + (rows @ h.unflatten(-1, (2, 4)) @ columns.T).flatten(-2)
            made.append(F.layer_norm(mixed, (self.rank,), weight, bias, eps=1e-6))
        return (torch.cat(made, -1),)


class Sublayer(nn.Module):
    """norm, linears, and their latent gates. `forward` takes and returns the residual stream and, in LaX, latents."""

    def __init__(self, fields: dict[str, Any], layer: int, *groups: tuple[str, str, list[tuple[int, int]]]) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(32, eps=1e-6)
        self.lax, self.layer = fields["family"] == "lax", layer
        for group, slots, shapes in groups:
            for slot, (inputs, outputs) in zip(slots.split(), shapes, strict=True):
                rank, bias = fields.get("rank"), "attn_bias" in fields and group in ("qkv", "o")
                linear = Factors(inputs, outputs, rank, "silu", bias) if rank else nn.Linear(inputs, outputs, bias)
                self.add_module(f"{slot}_proj", linear)
            if "qk_norm" in fields and group == "qkv":
                self.q_norm, self.k_norm = nn.RMSNorm(4, eps=1e-6), nn.RMSNorm(4, eps=1e-6)
            if self.lax and layer:
                self.add_module(f"{group}_mixer", Gate(slots, fields["rank"]))

    def project(self, x: Tensor, group: str, slots: str, prev: Tensor | None) -> tuple[list[Tensor], Tensor | None]:
        linears: list[Any] = [self.get_submodule(f"{slot}_proj") for slot in slots.split()]
        if not self.lax:
            return [linear(x) for linear in linears], None
        u = torch.cat([linear.A(x) for linear in linears], -1).flatten(0, 1)
        if prev is not None:
            (u,) = self.get_submodule(f"{group}_mixer")(u, prev)
        h = linears[0].act(u)
        parts = h.unflatten(0, (x.shape[0], -1)).chunk(len(linears), -1)
        return [linear.B(part) for linear, part in zip(linears, parts, strict=True)], h

    def result(self, x: Tensor, *latents: Tensor | None) -> Any:
        return (x, *latents) if self.lax and self.layer == 0 else x


class Attention(Sublayer):
    def __init__(self, fields: dict[str, Any], layer: int) -> None:
        super().__init__(fields, layer, ("qkv", "q k v", [(32, 32), (32, 8), (32, 8)]), ("o", "o", [(32, 32)]))

    def forward(self, x: Tensor, *prev: Tensor, documents: Tensor | None = None) -> Any:
        before = prev or (None, None)
        (q, k, v), first = self.project(self.norm(x), "qkv", "q k v", before[0])
        if hasattr(self, "q_norm"):
            heads = self.q_norm(q.unflatten(-1, (-1, 4))), self.k_norm(k.unflatten(-1, (-1, 4)))
            q, k = (y.flatten(-2) for y in heads)
        (update,), second = self.project(references.attention(q, k, v, SHAPE, documents), "o", "o", before[1])
        return self.result(x + update, first, second)


class MLP(Sublayer):
    def __init__(self, fields: dict[str, Any], layer: int) -> None:
        super().__init__(fields, layer, ("gate_up", "gate up", [(32, 48)] * 2), ("down", "down", [(48, 32)]))

    def forward(self, x: Tensor, *prev: Tensor) -> Any:
        before = prev or (None, None)
        (gate, up), first = self.project(self.norm(x), "gate_up", "gate up", before[0])
        (update,), second = self.project(F.silu(gate) * up, "down", "down", before[1])
        return self.result(x + update, first, second)


class Block(nn.Module):
    def __init__(self, fields: dict[str, Any], layer: int) -> None:
        super().__init__()
        self.attn, self.mlp = Attention(fields, layer), MLP(fields, layer)

    def forward(self, x: Tensor, *prev: Tensor, documents: Tensor | None = None) -> Any:
        made = self.attn(x, *prev[:2], documents=documents)
        x, *latents = made if isinstance(made, tuple) else (made,)
        made = self.mlp(x, *prev[2:])
        x, *more = made if isinstance(made, tuple) else (made,)
        return (x, *latents, *more) if latents else x


class Plain(nn.Module):
    """The decoder, with the weights of `boost.nn.Decoder`."""

    def __init__(self, family: str) -> None:
        super().__init__()
        fields = FAMILIES[family]
        self.embedding = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(Block(fields, layer) for layer in range(2))
        self.norm, self.lm_head = nn.RMSNorm(32, eps=1e-6), nn.Linear(32, 64, bias=False)
        self.double().load_state_dict(make(family).state_dict())

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, documents: Tensor | None = None, reduction: str = "mean"
    ) -> Tensor:
        stream: Any = (self.embedding(tokens),)
        for block in self.layers:
            made = block(*stream, documents=documents)
            stream = made if isinstance(made, tuple) else (made,)
        logits: Tensor = self.lm_head(self.norm(stream[0]))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)


@functools.cache
def _built(family: str) -> Plain:
    return Plain(family)


def plain(family: str) -> Plain:
    """A new `Plain` (building one takes longer than to train it)."""
    return copy.deepcopy(_built(family))


def batch() -> tuple[Tensor, Tensor]:
    """(tokens, targets), [4, 16] each, with unequal numbers of targets per sequence."""
    tokens = torch.randint(64, (4, 17), generator=torch.Generator().manual_seed(1))
    targets = tokens[:, 1:].clone()
    targets[0, ::3] = targets[3, :9] = -100
    return tokens[:, :-1], targets


Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def summed(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    loss: Tensor = model(tokens, targets, reduction="sum")
    return loss


def three_steps(model: nn.Module, loss: Loss = summed, replica: int = 0, replicas: int = 1) -> list[Tensor]:
    """The loss of each of three steps, then every whole parameter that is trained, as SGD leaves it."""
    tokens, targets = (x.chunk(replicas)[replica] for x in batch())
    count = int((batch()[1] != -100).sum())
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.5, momentum=0.5, foreach=False)  # AdamW would hide factors of a gradient
    made = []
    for _ in range(3):
        total = loss(model, tokens, targets) / count
        (total * replicas).backward()
        made.append(total.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    return made + [whole_weight(p.detach()).clone() for p in trained]
