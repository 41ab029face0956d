"""The parameters of a model as data: names and global (unsharded) shapes.

A block has four groups of linears that share an input: two project from the residual stream (qkv; gate_up), and two project back
to it (o; down). Checkpoints, initialization, layouts and cost models all refer to parameters by these names, never to fused
tensors.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from boost.config.families import SLOTS as SLOTS
from boost.config.families import ModelConfig
from boost.config.linears import Initial, Linear, Size
from boost.errors import ConfigError

IGNORED = -100
"""Target for positions that are excluded from the loss."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of the model: its name, global shape, and the role that determines its placement in a layout."""

    name: str
    shape: tuple[int, ...]
    role: str
    """embed | head | tied (both) | norm | final_norm | {enter,leave}.{inner,outer,weight} | q.{outer,weight} and kv.{outer,weight}
    (outputs are heads) | o.{inner,weight} (inputs are heads) | bias.{q,kv,o} | qk_norm | latent.rows and latent.whole (extra
    parameters of linears; latent.rows may be sharded along the rank) | output.{enter,leave} (of their outputs) |
    select.{enter,leave,o} (not trained)"""
    initial: Initial | None = None
    """Initial values; None: those of its role."""
    makes_outputs: bool = False
    """Whether it is an inner map whose results are a linear's outputs."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_index(self) -> bool:
        """Whether it is an int64 index (`Select`), which is not trained, and not a weight."""
        return self.role.startswith("select.")


@dataclass(frozen=True)
class Slot:
    """One linear in a block."""

    name: str
    d_in: int
    d_out: int
    linear: Linear
    kv: bool = False
    """Whether its outputs are key/value heads. There may be fewer of them than TP ranks."""
    bias: bool = False
    """Whether y also has a bias [d_out]."""

    @property
    def short(self) -> str:
        """Its name within its sublayer, such as q."""
        return self.name.partition(".")[2]


MapKind = Literal["inner", "outer", "weight", "select"]
"""From a linear's input to latents, from latents to its output, or both at once; or an index of its inputs."""


@dataclass(frozen=True)
class GroupSpec:
    """Linears that share one input. side: 'enter' projects from the residual stream to heads or channels; 'leave' projects back."""

    name: str
    side: str
    slots: tuple[Slot, ...]

    def __post_init__(self) -> None:
        kinds = {slot.linear.alike for slot in self.slots}
        if len(kinds) > 1:
            names = ", ".join(slot.name for slot in self.slots)
            raise ConfigError(
                f"{names} share an input, so they must have equally many maps and the same extra parameters"
            )

    @property
    def down_widths(self) -> tuple[int, ...]:
        """Width of u, the results of its inner maps, for every slot; zeros for dense linears."""
        return tuple(slot.linear.down_width for slot in self.slots)

    @property
    def up_widths(self) -> tuple[int, ...]:
        """Width of h, what its outer maps read, for every slot; zeros for dense linears."""
        return tuple(slot.linear.up_width for slot in self.slots)

    def maps(self, prefix: str, kind: MapKind) -> tuple[Parameter, ...]:
        """The maps of one kind, named `{prefix}.{slot}.{map}`: the first of every slot, in slot order, then the second of every
        slot, and so on. So a family's mathematics sees each part as one tensor for the whole group."""
        result = []
        for part in zip(*(getattr(slot.linear, kind) for slot in self.slots), strict=True):
            for slot, own in zip(self.slots, part, strict=True):
                shape: tuple[int, ...] = (slot.d_out, own.width) if kind == "outer" else (own.width, slot.d_in)
                role = self.role(slot, kind)
                if kind == "select":
                    shape, role = shape[:1], f"select.{role.partition('.')[0]}"
                is_full = kind == "inner" and not slot.linear.outer
                result.append(Parameter(f"{prefix}.{slot.name}.{own.name}", shape, role, own.initial, is_full))
        return tuple(result)

    def role(self, slot: Slot, kind: MapKind) -> str:
        """Role of the maps of one kind."""
        return f"{_AT_HEADS.get((slot.name, kind), self.side)}.{kind}"

    @property
    def kind(self) -> Linear:
        """What its linears have in common: a linear's own `carries`, `mixes_elements`, `sums`, and whether it has outer maps."""
        return self.slots[0].linear

    def extras(self, prefix: str) -> dict[str, tuple[Parameter, ...]]:
        """The extra parameters by the name of the tensor that stores them: `norm_weight` of all slots, or `gate_weight_q`."""
        stored: dict[str, tuple[Parameter, ...]] = {}
        for part in zip(*(slot.linear.extra for slot in self.slots), strict=True):
            role = f"output.{self.side}" if part[0].is_output else _LATENT[part[0].is_whole]
            made = [
                Parameter(f"{prefix}.{slot.name}.{own.name}", own.shape, role, own.initial)
                for slot, own in zip(self.slots, part, strict=True)
            ]
            if part[0].is_joined:
                stored[part[0].name] = tuple(made)
            else:
                stored |= {f"{part[0].name}_{slot.short}": (one,) for slot, one in zip(self.slots, made, strict=True)}
        return stored


_LATENT = ("latent.rows", "latent.whole")
"""Roles of extra parameters, by `Extra.is_whole`."""

_AT_HEADS: dict[tuple[str, str], str] = {
    **{("attn.q", kind): "q" for kind in ("outer", "weight")},
    **{(f"attn.{name}", kind): "kv" for name in "kv" for kind in ("outer", "weight")},
    **{("attn.o", kind): "o" for kind in ("inner", "weight", "select")},
}
"""Roles of weights whose rows or columns are heads, by (slot, kind)."""


def map_kinds(model: ModelConfig) -> tuple[MapKind, ...]:
    """The kinds of maps with weights in a model's linears, in forward order."""
    return ("inner", "outer") if model.low_rank else ("weight",)


@functools.lru_cache(maxsize=4096)
def groups(model: ModelConfig, layer: int) -> tuple[GroupSpec, GroupSpec, GroupSpec, GroupSpec]:
    """The four groups of block `layer`, in forward order."""
    d, f, q = model.dim, model.ffn_dim, model.heads_dim
    kv = model.kv_heads * model.head_dim

    def slot(name: str, d_in: int, d_out: int) -> Slot:
        bias = model.attn_bias != "none" and name.removeprefix("attn.") in model.attn_bias
        linear = model.linear(layer, Size(name, d_in, d_out))
        if bool(linear.inner) != model.low_rank:
            raise ConfigError(f"{name} of model.family = '{model.family}': whole weights cannot be mixed with factors")
        if wide := next((part for part in linear.select if part.width > d_in), None):
            raise ConfigError(
                f"{name}.{wide.name} of model.family = '{model.family}' selects {wide.width} inputs; at most {d_in} are valid"
            )
        if linear.inner and not linear.outer and linear.up_width != d_out:
            raise ConfigError(f"{name} of model.family = '{model.family}' makes {linear.up_width} outputs, not {d_out}")
        return Slot(name, d_in, d_out, linear, name in ("attn.k", "attn.v"), bias)

    return (
        GroupSpec("qkv", "enter", (slot("attn.q", d, q), slot("attn.k", d, kv), slot("attn.v", d, kv))),
        GroupSpec("o", "leave", (slot("attn.o", q, d),)),
        GroupSpec("gate_up", "enter", (slot("mlp.gate", d, f), slot("mlp.up", d, f))),
        GroupSpec("down", "leave", (slot("mlp.down", f, d),)),
    )


def attention_parameters(model: ModelConfig, group: GroupSpec, prefix: str) -> tuple[Parameter, ...]:
    """Biases of a group's linears, `bias` [d_out], and gains of the norms of queries and keys, `norm` [head_dim]."""
    biases = (
        Parameter(f"{prefix}.{slot.name}.bias", (slot.d_out,), "bias.kv" if slot.kv else f"bias.{slot.name[-1]}")
        for slot in group.slots
        if slot.bias
    )
    normed = ("attn.q", "attn.k") if model.qk_norm and group.name == "qkv" else ()
    return *biases, *(Parameter(f"{prefix}.{name}.norm", (model.head_dim,), "qk_norm") for name in normed)


def taken(model: ModelConfig, layer: int) -> tuple[GroupSpec, ...]:
    """The groups of the previous block that carry latents or outputs to block `layer`, in order; none for the first block, nor for
    one after the last."""
    if not 0 < layer < model.layers:
        return ()
    return tuple(group for group in groups(model, layer - 1) if group.kind.carries != "nothing")


def carries(model: ModelConfig) -> bool:
    """Whether latents or outputs pass from any block to the next."""
    return any(taken(model, layer + 1) for layer in different_blocks(model))


def slot_of(model: ModelConfig, name: str) -> Slot:
    """The linear that has the parameter `layers.{layer}.{linear}.{kind}`."""
    layer, rest = name.split(".", 2)[1:]
    linear = rest.rpartition(".")[0]
    return next(slot for group in groups(model, int(layer)) for slot in group.slots if slot.name == linear)


def first_alike(model: ModelConfig, layer: int) -> int:
    """The first block with the same linears as block `layer`, fed by tensors of the same widths by the previous block, and with
    rotary embeddings if it has them."""
    return _first_alike(model)[layer]


def different_blocks(model: ModelConfig) -> list[int]:
    """The first of each kind of block (`first_alike`)."""
    return sorted({*_first_alike(model)})


def linears(model: ModelConfig) -> Iterator[Slot]:
    """The linears of every kind of block."""
    return (slot for layer in different_blocks(model) for group in groups(model, layer) for slot in group.slots)


@functools.lru_cache(maxsize=256)
def is_usual(model: ModelConfig) -> bool:
    """Whether every linear is W x, or B act(A x) with an activation of BOOST."""
    usual = (slot.linear.is_pair or not model.low_rank for slot in linears(model))
    return model.math == ModelConfig.math and not carries(model) and all(usual)


def is_product(model: ModelConfig) -> bool:
    """Whether every linear is a product W = B A, which does not depend on the basis of its latents."""
    return is_usual(model) and model.low_rank and model.latent_act == "none"


@functools.lru_cache(maxsize=256)
def _first_alike(model: ModelConfig) -> tuple[int, ...]:
    first: dict[object, int] = {}
    arriving = (
        [(g.name, g.kind.carries == "latents" and g.up_widths) for g in taken(model, n)] for n in range(model.layers)
    )
    kinds = ((groups(model, n), tuple(prev), n in model.nope_layers) for n, prev in enumerate(arriving))
    return tuple(first.setdefault(kind, n) for n, kind in enumerate(kinds))


def block_parameters(model: ModelConfig, layer: int) -> Iterator[Parameter]:
    """Every parameter of block `layer`."""
    prefix = f"layers.{layer}"
    yield Parameter(f"{prefix}.attn_norm", (model.dim,), "norm")
    yield Parameter(f"{prefix}.mlp_norm", (model.dim,), "norm")
    for group in groups(model, layer):
        for kind in (*map_kinds(model), "select"):
            yield from group.maps(prefix, kind)
        yield from attention_parameters(model, group, prefix)
        for stored in group.extras(prefix).values():
            yield from stored


def embedding(model: ModelConfig) -> Parameter:
    """The token embedding, V x d."""
    return Parameter("embed", (model.vocab_size, model.dim), "tied" if model.tied else "embed")


def final_norm(model: ModelConfig) -> Parameter:
    """The RMSNorm before the head."""
    return Parameter("final_norm", (model.dim,), "final_norm")


def head(model: ModelConfig) -> Parameter:
    """The output projection, V x d; the embedding itself if they are tied."""
    return embedding(model) if model.tied else Parameter("head", (model.vocab_size, model.dim), "head")


def parameters(model: ModelConfig) -> Iterator[Parameter]:
    """Every parameter of the model."""
    yield embedding(model)
    for layer in range(model.layers):
        yield from block_parameters(model, layer)
    yield final_norm(model)
    if not model.tied:
        yield head(model)


def parameter_count(model: ModelConfig) -> int:
    """Number of parameters, including the embedding, the head and indices of selected inputs."""
    return sum(parameter.size for parameter in parameters(model))


def flops_per_token(model: ModelConfig, seq_len: int) -> int:
    """FLOPs per token for the forward and backward passes, as counted for model FLOPs utilization (MFU).

    6 per weight in every linear and in the head (2 forward, 4 backward; the embedding is a lookup), plus attention over the causal
    half of the scores. Recomputation is not counted.
    """
    return sum(block_flops_per_token(model, seq_len, n) for n in range(model.layers)) + 6 * head(model).size


def block_flops_per_token(model: ModelConfig, seq_len: int, layer: int) -> int:
    """FLOPs per token in one block. Attention takes 6 * heads_dim * seq_len for its two products over the causal half of the
    scores: 2 products * 2 FLOPs * heads_dim * seq_len / 2 forward, twice that backward."""
    multiplied = 0
    for group in groups(model, layer):
        for kind in map_kinds(model):
            multiplied += sum(parameter.size for parameter in group.maps("", kind))
        multiplied += sum(extra.multiplied for slot in group.slots for extra in slot.linear.extra)
    return 6 * multiplied + 6 * model.heads_dim * seq_len
