"""The parameters of a model as data: names and global shapes of the mathematics, before any cut. Arithmetic only.

A block is four groups of linears, each with one input: two enter the wide side (qkv; gate_up), two leave it (o; down).
Checkpoints, initial weights, layouts and cost models all speak of parameters by these names, never of fused storage.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from boost.config.schema import ModelConfig

IGNORED = -100
"""Target of a position that has no loss."""


@dataclass(frozen=True)
class Parameter:
    """One mathematical parameter: its name, its global shape, and the role by which a layout decides where to cut it."""

    name: str
    shape: tuple[int, ...]
    role: str
    """embed | head | norm | final_norm | {enter,leave}.{A,B,W} | kv.{B,W}, which end in key/value heads"""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Slot:
    """One linear of a block: y = W x, or y = B act(A x) with A: rank x d_in and B: d_out x rank."""

    name: str
    d_in: int
    d_out: int
    rank: int | None
    kv: bool = False
    """Whether its outputs are key/value heads, of which there may be fewer than TP processes."""


@dataclass(frozen=True)
class Group:
    """Linears that share one input. side: 'enter' goes from the residual to heads or channels, 'leave' comes back."""

    name: str
    side: str
    slots: tuple[Slot, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Widths of the latents, one a slot; empty for dense."""
        return tuple(slot.rank for slot in self.slots if slot.rank is not None)

    def parameters(self, prefix: str, factor: str) -> tuple[Parameter, ...]:
        """The factor 'A', 'B' or 'W' of every slot, in slot order, as `{prefix}.{slot}.{factor}`."""
        result = []
        for slot in self.slots:
            rank = slot.rank or 0
            shape = {"A": (rank, slot.d_in), "B": (slot.d_out, rank), "W": (slot.d_out, slot.d_in)}[factor]
            side = "kv" if slot.kv and factor != "A" else self.side
            result.append(Parameter(f"{prefix}.{slot.name}.{factor}", shape, f"{side}.{factor}"))
        return tuple(result)


def groups(model: ModelConfig) -> tuple[Group, Group, Group, Group]:
    """The four groups of every block, in the order in which a token meets them."""
    d, f, r = model.dim, model.ffn_dim, model.rank
    kv = model.kv_heads * model.head_dim
    qkv = (Slot("attn.q", d, d, r), Slot("attn.k", d, kv, r, kv=True), Slot("attn.v", d, kv, r, kv=True))
    return (
        Group("qkv", "enter", qkv),
        Group("o", "leave", (Slot("attn.o", d, d, r),)),
        Group("gate_up", "enter", (Slot("mlp.gate", d, f, r), Slot("mlp.up", d, f, r))),
        Group("down", "leave", (Slot("mlp.down", f, d, r),)),
    )


def block_parameters(model: ModelConfig, layer: int) -> Iterator[Parameter]:
    """Every parameter of block `layer`."""
    prefix = f"layers.{layer}"
    yield Parameter(f"{prefix}.attn_norm", (model.dim,), "norm")
    yield Parameter(f"{prefix}.mlp_norm", (model.dim,), "norm")
    for group in groups(model):
        for factor in "AB" if model.low_rank else "W":
            yield from group.parameters(prefix, factor)


def embedding(model: ModelConfig) -> Parameter:
    """The token embedding, V x d."""
    return Parameter("embed", (model.vocab_size, model.dim), "embed")


def final_norm(model: ModelConfig) -> Parameter:
    """The RMSNorm before the head."""
    return Parameter("final_norm", (model.dim,), "final_norm")


def head(model: ModelConfig) -> Parameter:
    """The output projection, V x d, not tied to the embedding."""
    return Parameter("head", (model.vocab_size, model.dim), "head")


def parameters(model: ModelConfig) -> Iterator[Parameter]:
    """Every parameter of the model."""
    yield embedding(model)
    for layer in range(model.layers):
        yield from block_parameters(model, layer)
    yield final_norm(model)
    yield head(model)


def parameter_count(model: ModelConfig) -> int:
    """Number of parameters, embedding and head included."""
    return sum(parameter.size for parameter in parameters(model))


def flops_per_token(model: ModelConfig, seq_len: int) -> int:
    """Floating-point operations of forward and backward for one token: what model FLOP utilisation (MFU) counts.

    6 per weight of every linear and of the head (2 forward, 4 backward; the embedding is a look-up), and attention.
    Recomputation is never counted.
    """
    return model.layers * block_flops_per_token(model, seq_len) + 6 * head(model).size


def block_flops_per_token(model: ModelConfig, seq_len: int) -> int:
    """The same of one block. 6 * dim * seq_len are for attention's two products over the causal half of the scores:
    2 products * 2 FLOPs * dim * seq_len / 2 forward, twice that backward."""
    linear = sum(parameter.size for parameter in block_parameters(model, 0) if parameter.role != "norm")
    return 6 * linear + 6 * model.dim * seq_len
