"""`LowRankAttention`, `LowRankMLP`, and `Block`: a decoder's sublayers and blocks as modules, under any layout.

The mathematics is the same as in `boost.models`, but the linears in a group are separate modules.

Legend: B sequences, S tokens per sequence, T = B * S, D width of the residual stream held here: dim, or dim / p if it is sharded.
"""

import copy
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from boost.config import architecture
from boost.config.architecture import Parameter
from boost.errors import ConfigError
from boost.models.attention import Context, Heads, make_context
from boost.models.block import TransformerBlock, attention, interleave, mlp
from boost.models.fused import FusedModule, Sharding
from boost.models.group import Dense, LinearGroup
from boost.models.init import initialize
from boost.models.interface import Flow, Layout, Stream
from boost.models.kernels import gemms
from boost.models.latents import Mixer
from boost.models.recompute import POLICIES
from boost.nn.linear import linear_of
from boost.nn.plain import call, difference, is_read
from boost.nn.spec import Spec, autocast_resolved
from boost.nn.weights import local_weight, once_differentiable, shard_weights, storage


class SeparateMixer(Mixer):
    """A mixer with one tensor per parameter. If one tensor held several parameters sharded along dim 0, it would be a DTensor with
    reordered rows."""

    def add_fused_param(self, attribute: str, parameters: Sequence[Parameter], layout: Sharding) -> None:
        if len(parameters) == 1 and attribute.rpartition("_")[2] in self.names:
            super().add_fused_param(attribute, parameters, layout)
            return
        for name, parameter in zip(self.names, parameters, strict=True):
            super().add_fused_param(f"{attribute}_{name}", (parameter,), layout)

    def of(self, name: str, slot: int) -> Tensor:
        return local_weight(self, f"{name}_{self.names[slot]}")

    def joined(self, name: str) -> Tensor:
        return torch.cat([self.of(name, slot) for slot in range(len(self.names))])


class SeparateHeads(Heads):
    """`Heads` that looks up its parameters at each use: q_bias in the linear q_proj, q_norm in a module of this name, ..."""

    def __init__(self, owner: nn.Module, spec: Spec, layer: int, outer: str) -> None:
        """`outer`: the name of the map that adds a linear's bias, if it is factored."""
        self._owner, self._outer = owner, outer
        super().__init__(spec.model, layer, spec.layout)

    def __getattr__(self, name: str) -> Tensor:
        slot, _, kind = name.partition("_")
        if kind == "norm":
            return local_weight(self._owner.get_submodule(name))
        if kind == "bias":
            linear: Any = self._owner.get_submodule(f"{slot}_proj")
            return local_weight(linear._modules.get(self._outer, linear), "bias")
        raise AttributeError(name)


class SeparateLinears(LinearGroup):
    """A `LinearGroup` that looks up its weights in separate modules at each use, because users may replace them.

    In training, grouped inner maps are concatenated for their GEMM, a copy of 3 r d numbers for qkv. Fused parameters need no copy.
    """

    def __init__(self, owner: nn.Module, spec: Spec, layer: int, shape: architecture.GroupSpec) -> None:
        """`owner` has the linears as child modules q_proj, k_proj, ..., and their extra parameters."""
        self._owner, self.names = owner, [f"{slot.name.partition('.')[2]}_proj" for slot in shape.slots]
        self._mixer = f"{shape.name}_mixer"
        super().__init__(spec.model, shape, layer, spec.layout, POLICIES[spec.recompute])
        self.paths = {
            kind: [
                (self.names[n % len(self.names)], part.name.rpartition(".")[2])
                for n, part in enumerate(shape.maps("", kind))
            ]
            for kind in (*architecture.map_kinds(spec.model), "select")
        }
        """(linear, map) of every map, by kind."""
        self._kind = type(linear_of(shape.slots[0].linear, self.act)) if self.low_rank else nn.Linear
        self.outer = shape.kind.last[0].name if self.low_rank else ""
        """Name of the map that adds a linear's bias, if it is factored."""
        self.heads = SeparateHeads(owner, spec, layer, self.outer)
        self._norms = ("q_norm", "k_norm") if shape.name == "qkv" and self.heads.has_norms else ()

    @property
    def bias(self) -> Tensor:  # type: ignore[override]
        return local_weight(self.linears[0]._modules.get(self.outer, self.linears[0]), "bias")

    @property
    def mixer(self) -> Mixer | None:  # type: ignore[override]
        return cast(Mixer | None, self._owner._modules.get(self._mixer))

    @property
    def linears(self) -> list[Any]:
        """The linears, one per slot."""
        return [self._owner._modules[name] for name in self.names]

    @property
    def norms(self) -> list[Any]:
        """The norms of heads, for q and k if any."""
        return [self._owner._modules[name] for name in self._norms]

    def maps(self, kind: architecture.MapKind) -> list[Any]:
        """The modules of the maps of one kind, in the order of `GroupSpec.maps`."""
        modules: Any = self._owner._modules
        return [modules[linear]._modules[name] for linear, name in self.paths[kind]]

    @property
    def inner(self) -> Tensor:  # type: ignore[override]
        weights = [local_weight(module) for module in (self.maps("inner") if self.low_rank else self.linears)]
        return weights[0] if len(weights) == 1 else torch.cat(weights)

    @property
    def index(self) -> Tensor | None:  # type: ignore[override]
        modules: Any = self._owner._modules
        indices = [storage(modules[linear]._buffers[name]) for linear, name in self.paths["select"]]
        return torch.cat(indices) if indices else None

    @property
    def up_widths(self) -> list[int]:  # type: ignore[override]
        return [module.in_features for module in self.maps("outer")] or self.down_widths

    def weights(self) -> list[Tensor]:
        weights = [local_weight(module) for module in (self.maps("outer") if self.low_rank else self.linears)]
        owned = itertools.cycle(self.own_heads)
        return [w if own is None else w.narrow(0, *own) for w, own in zip(weights, owned, strict=False)]

    def down(self, x_TI: Tensor, gamma_I: Tensor | None = None) -> Tensor:
        if torch.is_grad_enabled() or gamma_I is not None or not self.low_rank:
            return super().down(x_TI, gamma_I)
        # During generation, concatenating the inner maps for each token would take longer than multiplying by them.
        u_TU = gemms([(x_TI, local_weight(module).to(x_TI.dtype).t()) for module in self.maps("inner")])
        return self.with_selected(u_TU, x_TI, self.index)

    def changed(self, inside: bool = True) -> str | None:
        """The first module that is not plain, with the difference; None: all are plain. `inside` includes factors, the norms of
        heads and extra parameters."""
        for slot, name, linear in zip(self.shape.slots, self.names, self.linears, strict=True):
            if self.low_rank:
                what = difference(linear, self._kind, act=self.slot_acts[self.names.index(name)])
            else:
                what = difference(linear, nn.Linear, biased=slot.bias)
            if what:
                return f"{name} {what}"
            maps = (*slot.linear.inner, *slot.linear.outer) if inside else ()
            for part in maps:
                biased = part is slot.linear.last[0] and slot.bias
                if what := difference(cast(nn.Module, linear._modules[part.name]), nn.Linear, biased=biased):
                    return f"{name}.{part.name} {what}"
        for name, norm in zip(self._norms, self.norms, strict=True) if inside else ():
            if what := difference(norm, nn.RMSNorm, eps=self.heads.eps):
                return f"{name} {what}"
        what = difference(self.mixer, SeparateMixer) if self.mixer is not None and inside else None
        return what and f"{self._mixer} {what}"


class SeparateDense(Dense, SeparateLinears):
    """The same, without a bottleneck."""


class CalledLinears(SeparateLinears):
    """A group of linears on one process that are called, as in any PyTorch model, and the norms of their heads. Linears add their
    biases."""

    def __init__(self, group: SeparateLinears, batch: int) -> None:
        heads = copy.copy(group.heads)
        heads.has_biases = heads.has_norms = False
        self.__dict__ = {**group.__dict__, "adds_bias": False, "heads": heads}
        self.is_one_node, self.up_runner = False, self.policy.local
        self._batch = batch

    def down(self, x_TI: Tensor, gamma_I: Tensor | None = None) -> Tensor:
        u_TU = torch.cat([call(module, x_TI, self._batch) for module in self.maps("inner")], dim=-1)
        return self.with_selected(u_TU, x_TI, self.index)

    def project(self, h_TR: Tensor) -> Sequence[Tensor]:
        widths = [outer.shape[1] for outer in self.shape.maps("", "outer")]
        return self.outputs(self.maps("outer"), h_TR.split(widths, dim=-1))

    def outputs(self, modules: Sequence[nn.Module], inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        parts = [call(module, x, self._batch) for module, x in zip(modules, inputs, strict=True)]
        y = [functools.reduce(torch.add, parts[slot :: len(self.names)]) for slot in range(len(self.names))]
        for slot, norm in enumerate(self.norms):
            y[slot] = call(norm, y[slot].unflatten(-1, (-1, self.heads.head_dim)), self._batch).flatten(1)
        return y


class CalledDense(Dense, CalledLinears):
    """The same, for whole linears, which may be low-rank: no other block uses their latents."""

    def down(self, x_TI: Tensor, gamma_I: Tensor | None = None) -> Tensor:
        return x_TI if self.shape.side == "enter" else self.outputs(self.linears, [x_TI])[0]

    def project(self, h_TR: Tensor) -> Sequence[Tensor]:
        return (h_TR,) if self.shape.side == "leave" else self.outputs(self.linears, [h_TR] * len(self.names))


def called(group: SeparateLinears, batch: int) -> CalledLinears:
    """If the block does more with latents than act, which no linear as a whole knows, maps are called; else whole linears. Raises
    ConfigError if such a linear is not plain as a whole, or would add a bias or a norm to outputs that the block computes with."""
    if group.finishes and (group.adds_bias or group.heads.has_biases or group.heads.has_norms):
        raise ConfigError(f"{group.names[0]} is not plain, but its block computes with outputs before biases and norms")
    if not group.feeds_next and not group.mixes:
        return CalledDense(group, batch)
    if what := group.changed(inside=False):
        raise ConfigError(
            f"{what}, but its block computes with its latents; change its maps, such as {group.outer}, instead"
        )
    return CalledLinears(group, batch)


Groups = tuple[LinearGroup, LinearGroup]
"""The groups of a sublayer: into attention or the MLP, and out of it."""


class Sublayer(FusedModule):
    """A pre-norm residual sublayer under a layout."""

    norm: nn.RMSNorm
    name: str
    """Name of this sublayer in a block."""
    index: int
    """Its first group of linears among those of a block."""
    run_groups: Callable[..., Iterator[None]]
    """`run`, given the norm (its weight, or a function) and the groups of linears."""

    def __init__(self, spec: Spec | None = None, layer: int = 0, *, _alone: bool = True, **sizes: object) -> None:
        """Built from a `Spec` or sizes: LowRankAttention(dim=512, heads=8, rank=128). Raises ConfigError if they are invalid."""
        super().__init__()
        self.spec = spec = as_spec(spec, sizes)
        self.model, self.layout = spec.model, spec.layout
        """`initialize` reads these attributes."""
        self.layer = layer
        with spec.allocation():
            add_norm(self, spec, Parameter(f"layers.{layer}.{self.name}_norm", (self.model.dim,), "norm"))
            groups = architecture.groups(self.model, layer)
            self.groups = self._add_linears(groups[self.index]), self._add_linears(groups[self.index + 1])
        if _alone:
            initialize(self, self.spec.seed)  # type: ignore[arg-type]
            shard_weights(self, self.spec)

    def _add_linears(self, shape: architecture.GroupSpec) -> SeparateLinears:
        """Adds a group's uninitialized linears, as q_proj, k_proj, ..., and their extra parameters."""
        prefix = f"layers.{self.layer}"
        separate = self.layout.group_class(SeparateLinears if self.model.low_rank else SeparateDense, shape)
        group: SeparateLinears = separate(self, self.spec, self.layer, shape)
        if self.model.low_rank:
            for name, slot, act in zip(group.names, shape.slots, group.slot_acts, strict=True):
                self.add_module(name, linear_of(slot.linear, act))
            for parameter, (linear, name) in zip(shape.maps(prefix, "select"), group.paths["select"], strict=True):
                index = torch.empty(self.spec.local_shape(parameter), dtype=torch.int64)
                self.get_submodule(linear).register_buffer(name, index)
                self.describe_child(f"{linear}.{name}", parameter, self.layout)
        for kind in architecture.map_kinds(self.model):
            for parameter, (linear, name) in zip(shape.maps(prefix, kind), group.paths[kind], strict=True):
                path = f"{linear}.{name}" if self.model.low_rank else linear
                self.set_submodule(path, uninitialized_linear(self.spec, parameter))
                self.describe_child(f"{path}.weight", parameter, self.layout)
        for parameter in architecture.attention_parameters(self.model, shape, prefix):
            slot_name, vector = parameter.name.split(".")[-2:]
            if vector == "norm":
                add_norm(self, self.spec, parameter, f"{slot_name}_norm")
                continue
            path = f"{slot_name}_proj.{group.outer}" if self.model.low_rank else f"{slot_name}_proj"
            self.get_submodule(path).bias = nn.Parameter(torch.empty(self.spec.local_shape(parameter)))
            self.describe_child(f"{path}.bias", parameter, self.layout)
        if group.mixes or group.finishes:
            self.add_module(f"{shape.name}_mixer", SeparateMixer(group.math, shape, group.before, prefix, self.layout))
        return group

    def forward(self, x: Tensor, *prev: Tensor, batch: int | None = None, run: "Run | None" = None) -> "Output":
        """[B, S, D] -> [B, S, D]: the residual stream after this sublayer, in the layout's shape (`spec.layout`).

        A token-sharded stream (btp-sp, megatron-sp) is [T / p, D], consecutive tokens from all sequences, and `batch` is B.
        A block passes `prev`, the latents of the previous block, and `run`, and gets (x, *latents) if others follow.
        """
        if run is None:
            return run_alone(self, Sublayer.forward, x, batch)
        layout, (context,) = run
        flow = Flow(x.reshape(-1, x.shape[-1]), prev)
        interleave([self.run(layout, flow, context)])
        made = _tensors(layout, [Stream(flow.x, flow.latents)], [context])
        return made if len(made) > 1 else made[0]

    def run(self, layout: Layout, flow: Flow, context: Context) -> Iterable[None]:
        """Runs one part of a micro-batch through this sublayer."""
        what = difference(cast(nn.Module, self._modules["norm"]), nn.RMSNorm, eps=self.model.norm_eps)
        what = f"norm {what}" if what else self.groups[0].changed() or self.groups[1].changed()
        if is_read(what and f"layers.{self.layer}.{self.name}.{what}", self.spec.tp.size):
            return self.run_groups(layout, flow, context, local_weight(self.norm), self.groups)
        norm = functools.partial(call, self.norm, batch=context.batch)
        first, second = (called(group, context.batch) for group in self.groups)
        return self.run_groups(layout, flow, context, norm, (first, second))


Output = Tensor | tuple[Tensor, ...]
"""The residual stream, or (x, *latents) of each part of a micro-batch."""
Run = tuple[Layout, Sequence[Context]]
"""What a decoder passes to its blocks in addition to tensors: the layout, and a context for each part of the micro-batch."""


def _tensors(layout: Layout, streams: Sequence[Stream], contexts: Sequence[Context]) -> tuple[Tensor, ...]:
    """(x, *latents) of each part, with x as [B, S, D], as hooks expect it, unless the layout shards tokens."""
    made: list[Tensor] = []
    for (x, latents), context in zip(streams, contexts, strict=True):
        is_whole = layout.residual_shape(layout.size)[0] == layout.size
        made += [x.view(context.batch, -1, x.shape[-1]) if is_whole else x, *latents]
    return tuple(made)


def _streams(made: Tensor | Sequence[Tensor], parts: int) -> list[Stream]:
    """Inverse of `_tensors`."""
    tensors = [made] if isinstance(made, Tensor) else made
    each = zip(*[iter(tensors)] * (len(tensors) // parts), strict=True)
    return [Stream(x.reshape(-1, x.shape[-1]), tuple(latents)) for x, *latents in each]


def as_spec(spec: Spec | None, sizes: dict[str, Any]) -> Spec:
    """`spec`, or one made from sizes. Raises ConfigError if both are given."""
    if spec is not None and sizes:
        raise ConfigError(f"{next(iter(sizes))} cannot be combined with spec; pass either spec or sizes")
    return spec if spec is not None else Spec(**sizes)


def uninitialized_linear(spec: Spec, parameter: Parameter) -> nn.Linear:
    """A linear for this process's shard of a weight. Draws no random numbers."""
    rows, columns = spec.local_shape(parameter)
    linear = nn.Linear(columns, rows, bias=False, device="meta")
    linear.weight = nn.Parameter(torch.empty(rows, columns))
    return linear


def add_norm(module: FusedModule, spec: Spec, parameter: Parameter, name: str = "norm") -> None:
    """Adds an RMSNorm, which layouts apply together with the projection next to it."""
    module.add_module(name, nn.RMSNorm(spec.local_shape(parameter), eps=spec.model.norm_eps))
    module.describe_child(f"{name}.weight", parameter, spec.layout)


def run_alone(module: "Sublayer | Block", forward: Callable[..., Any], x: Tensor, batch: int | None) -> Tensor:
    """The residual stream after a module by itself; `forward`: its class's own, which a subclass may have overridden. Raises
    ConfigError for a family that passes latents between blocks, or if `batch` does not divide the number of tokens."""
    model, layout, p = module.model, module.layout, module.layout.size
    if architecture.carries(model):
        raise ConfigError(
            f"family = '{model.family}' passes latents or outputs from block to block; run the blocks through boost.nn.Decoder"
        )
    batch = batch or (x.shape[0] if x.dim() == 3 else 1)
    # A token-sharded stream has T / p rows.
    tokens = x.numel() // x.shape[-1] * p // layout.residual_shape(p)[0]
    if tokens % batch:
        raise ConfigError(f"batch = {batch} does not divide the {tokens} tokens of x")
    positions_S = torch.arange(tokens // batch, device=x.device)
    with autocast_resolved(x.device, x.dtype) as dtype:
        context = make_context(batch, positions_S, model, dtype)
        after = forward(module, x.to(dtype), run=(layout, [context]))
    return once_differentiable(after.reshape(x.shape).to(x.dtype))


class LowRankAttention(Sublayer):
    """x + o(attention(q, k, v)), where q, k, v are projections of RMSNorm(x): grouped-query attention, with rotary embeddings
    except in the blocks of nope_layers.

    `q_proj`, `k_proj`, `v_proj` and `o_proj` are `LowRankLinear` modules (`nn.Linear` with family = "dense"). The norm
    and the residual update belong to the sublayer, because layouts merge them with the projections' collectives.
    """

    name, index = "attn", 0
    q_norm: nn.RMSNorm
    k_norm: nn.RMSNorm

    def run_groups(self, layout: Layout, flow: Flow, context: Context, norm: Any, groups: Groups) -> Iterator[None]:
        cache = context.caches[self.layer] if context.caches else None
        return attention(layout, flow, context, norm, *groups, cache)


class LowRankMLP(Sublayer):
    """x + down(silu(gate) * up), where gate and up are projections of RMSNorm(x).

    `gate_proj`, `up_proj` and `down_proj` are `LowRankLinear` modules (`nn.Linear` with family = "dense").
    """

    name, index = "mlp", 2

    def run_groups(self, layout: Layout, flow: Flow, context: Context, norm: Any, groups: Groups) -> Iterator[None]:
        return mlp(layout, flow, norm, *groups, self.model.mlp_silu)


class Block(TransformerBlock):
    """A decoder block: `attn`, then `mlp`."""

    def __init__(self, spec: Spec | None = None, layer: int = 0, *, _alone: bool = True, **sizes: object) -> None:
        """Built from a `Spec` or sizes: Block(dim=512, heads=8, rank=128). Raises ConfigError if they are invalid."""
        FusedModule.__init__(self)
        self.spec = as_spec(spec, sizes)
        self.model, self.layout = self.spec.model, self.spec.layout
        self.layer_index = layer
        self.attn = LowRankAttention(self.spec, layer, _alone=False)
        self.mlp = LowRankMLP(self.spec, layer, _alone=False)
        self.policy = POLICIES[self.spec.recompute]
        if _alone:
            initialize(self, self.spec.seed)  # type: ignore[arg-type]
            shard_weights(self, self.spec)

    @property
    def groups(self) -> tuple[LinearGroup, LinearGroup, LinearGroup, LinearGroup]:
        """The groups of linears, in forward order."""
        return *self.attn.groups, *self.mlp.groups

    @property
    def is_plain(self) -> bool:
        """Whether `forward` does nothing beyond `run`."""
        return super().is_plain and difference(self, Block) is None

    def run(self, layout: Layout, flow: Flow, context: Context) -> Iterator[None]:
        for sublayer, kind in ((self.attn, LowRankAttention), (self.mlp, LowRankMLP)):
            what = difference(sublayer, kind)
            if is_read(what, 1) or (what is None and layout.halves):
                yield from sublayer.run(layout, flow, context)
                continue
            name = f"layers.{self.layer_index}.{kind.name}"
            if layout.halves:
                raise ConfigError(f"{name} {what}: overlap = 'halves' does not call it; attach it to the block")
            inner = next((part for part in sublayer.modules() if isinstance(part, kind)), None)
            if inner is None:
                raise ConfigError(f"{name} {what}, not a {kind.__name__}; use a subclass of it, or a hook")
            taken = sum(group.takes_prev + group.takes_outputs for group in inner.groups)
            before = [Stream(flow.x, tuple(flow.take() for _ in range(taken)))]
            made = sublayer(*_tensors(layout, before, [context]), run=(layout, [context]))
            ((flow.x, latents),) = _streams(made, 1)
            flow.latents += latents

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """A decoder passes (layout, streams, contexts). Hooks, wrappers and FSDP get the tensors in the streams."""
        if not arguments or isinstance(arguments[0], Tensor):
            return super().__call__(*arguments, **options)
        layout, streams, contexts = arguments
        if is_read(difference(self, Block), 1):
            return super().forward(layout, streams, contexts)
        return _call_on_tensors(super().__call__, layout, streams, contexts)

    def forward(self, x: Tensor, *rest: Tensor, batch: int | None = None, run: Run | None = None) -> Output:  # type: ignore[override]
        """[B, S, D] -> [B, S, D]: the residual stream after the block, as in `LowRankAttention.forward`.

        A decoder passes `run`, and (x, *latents) for each part of the micro-batch.
        """
        if run is None:
            return run_alone(self, Block.forward, x, batch)
        layout, contexts = run
        made = _tensors(layout, super().forward(layout, _streams((x, *rest), len(contexts)), contexts), contexts)
        return made if len(made) > 1 else made[0]


class WrappedBlock:
    """A module around a block, such as `checkpoint_wrapper`'s. It gets tensors, because reentrant checkpointing, for one, passes no
    gradient to tensors in lists."""

    is_plain = False

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.is_compiled = bool(getattr(module, "is_compiled", False))

    def __call__(self, layout: Layout, streams: Sequence[Stream], contexts: Sequence[Context]) -> list[Stream]:
        return _call_on_tensors(self._module, layout, streams, contexts)


def _call_on_tensors(
    module: Callable[..., Output], layout: Layout, streams: Sequence[Stream], contexts: Sequence[Context]
) -> list[Stream]:
    return _streams(module(*_tensors(layout, streams, contexts), run=(layout, contexts)), len(contexts))
