"""`LowRankAttention`, `LowRankMLP`, and `Block`: a decoder's sublayers and blocks as modules, under any layout.

The mathematics is the same as in `boost.models`, but the linears in a group are separate modules.

Legend: B sequences, S tokens per sequence, T = B * S, D width of the residual stream held here: dim, or dim / p if it is sharded.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from boost.config import architecture
from boost.config.architecture import Parameter
from boost.errors import ConfigError
from boost.models.attention import Context, attend, make_context, split_heads
from boost.models.block import TransformerBlock, attention, interleave, mlp
from boost.models.fused import FusedModule, Sharding
from boost.models.group import NO_RECOMPUTE, Flow, Latents, LinearGroup, Stream
from boost.models.init import initialize
from boost.models.interface import NOTHING_IN_FLIGHT, Layout
from boost.models.kernels import gated_product, gemms, rotary
from boost.models.latent_gate import LatentGate
from boost.nn.linear import LowRankLinear
from boost.nn.plain import call, difference, is_read
from boost.nn.spec import Spec, autocast_resolved
from boost.nn.weights import local_weight, shard_weights
from boost.parallel.recompute import POLICIES


class Gate(LatentGate):
    """A latent gate with one tensor per parameter. If one tensor held several parameters sharded along dim 0, it would be a
    DTensor with reordered rows."""

    def add_fused_param(self, attribute: str, parameters: Sequence[Parameter], layout: Sharding) -> None:
        if attribute.startswith("norm_"):
            for name, parameter in zip(self._names, parameters, strict=True):
                super().add_fused_param(f"{attribute}_{name}", (parameter,), layout)
        else:
            super().add_fused_param(attribute, parameters, layout)

    def _slot_param(self, name: str, slot: int) -> Tensor:
        return local_weight(self, f"{name}_{self._names[slot]}")

    def _norm(self, slots: range) -> tuple[Tensor, Tensor]:
        weight, bias = ([self._slot_param(name, slot) for slot in slots] for name in ("norm_weight", "norm_bias"))
        return torch.cat(weight), torch.cat(bias)

    def __call__(self, latents: Sequence[Tensor], prev_latents: Sequence[Tensor]) -> Any:
        return super().__call__(*latents, *prev_latents)  # hooks see tensors only

    def forward(self, *tensors: Tensor) -> Any:  # type: ignore[override]
        """As many latents, then the previous block's."""
        count = len(tensors) // 2
        return tuple(super().forward(tensors[:count], tensors[count:]))


class SeparateLinears(LinearGroup):
    """A `LinearGroup` that looks up its weights in separate modules at each use, because users may replace them.

    In training, grouped factors A are concatenated for their GEMM, a copy of 3 r d numbers for qkv. Fused parameters need no copy.
    """

    def __init__(self, owner: nn.Module, spec: Spec, layer: int, shape: architecture.GroupSpec) -> None:
        """`owner` has the linears as child modules q_proj, k_proj, ..., and the latent gate."""
        self._owner, self._names = owner, [child_name(slot) for slot in shape.slots]
        self._gate = f"{shape.name}_gate"
        self.describe(spec.model, shape, layer, spec.layout)

    @property
    def latent_gate(self) -> LatentGate | None:  # type: ignore[override]
        return cast(LatentGate | None, self._owner._modules.get(self._gate))

    @property
    def linears(self) -> list[nn.Module]:
        """The linears, one per slot."""
        modules = self._owner._modules
        return [cast(nn.Module, modules[name]) for name in self._names]

    @property
    def inner_modules(self) -> list[nn.Module]:
        """Factors A, one per slot."""
        return [cast(LowRankLinear, linear).A for linear in self.linears]

    @property
    def outer_modules(self) -> list[nn.Module]:
        """Factors B, or whole linears in a dense group, one per slot."""
        return [cast(LowRankLinear, linear).B for linear in self.linears] if self.low_rank else self.linears

    @property
    def A(self) -> Tensor:  # type: ignore[override]
        weights = [local_weight(module) for module in self.inner_modules]
        return weights[0] if len(weights) == 1 else torch.cat(weights)

    @property
    def ranks_here(self) -> Sequence[int]:
        return [cast(nn.Linear, module).out_features for module in self.inner_modules]

    def weights(self) -> list[Tensor]:
        weights = [local_weight(module) for module in self.outer_modules]
        return [w if own is None else w.narrow(0, *own) for w, own in zip(weights, self.own_heads, strict=True)]

    def inner(self, x_TI: Tensor) -> list[Tensor]:
        if self.low_rank and self.is_one_tensor and not torch.is_grad_enabled():
            # During generation, concatenating the A factors for each token would take longer than multiplying by them.
            return [gemms([(x_TI, local_weight(module).to(x_TI.dtype).t()) for module in self.inner_modules])]
        return super().inner(x_TI)

    def changed(self) -> str | None:
        """The first module that is not plain, with the difference; None: all are plain."""
        for name, linear in zip(self._names, self.linears, strict=True):
            if not self.low_rank:
                what = difference(linear, nn.Linear)
            elif what := self.linear_changed(linear):
                pass
            elif what := difference(linear._modules["A"], nn.Linear):  # type: ignore[arg-type]
                name += ".A"
            elif what := difference(linear._modules["B"], nn.Linear):  # type: ignore[arg-type]
                name += ".B"
            if what:
                return f"{name} {what}"
        gate = self.latent_gate
        what = None if gate is None else difference(gate, Gate)
        return f"{self._gate} {what}" if what else None

    def linear_changed(self, linear: nn.Module) -> str | None:
        """What makes a linear other than two factors with the family's activation between them."""
        return difference(linear, LowRankLinear, activation="silu" if self.silu else "none")

    def call(self, x_BSI: Tensor, prev: Latents) -> tuple[list[Tensor], Latents]:
        """Calls the linears: (one [B, S, O] per slot, latents for the next block). If latents pass between blocks, which no linear
        as a whole knows, calls A, the latent gate and B."""
        if not self.feeds_next and self.latent_gate is None:
            return [call(linear, x_BSI) for linear in self.linears], ()
        for name, linear in zip(self._names, self.linears, strict=True):
            if what := self.linear_changed(linear):
                raise ConfigError(
                    f"{name} {what}: family 'lax' passes latents from A and B to other blocks; change A or B instead"
                )
        latents = [call(module, x_BSI).flatten(0, 1) for module in self.inner_modules]
        widths = [u.shape[-1] for u in latents]
        h, new = self.activate([torch.cat(latents, dim=-1)] if self.is_one_tensor else latents, prev)
        parts = h[0].split(widths, dim=-1) if self.is_one_tensor else h
        slots = zip(self.outer_modules, parts, strict=True)
        return [call(module, part.view(*x_BSI.shape[:2], -1)) for module, part in slots], new


def child_name(slot: architecture.Slot) -> str:
    """Name of a slot's child module, such as q_proj for attn.q."""
    return f"{slot.name.partition('.')[2]}_proj"


def _parameters(shape: architecture.GroupSpec, prefix: str, factor: str, slot: architecture.Slot) -> list[Parameter]:
    return [p for p in shape.parameters(prefix, factor) if p.name == f"{prefix}.{slot.name}.{factor}"]


class Sublayer(FusedModule):
    """A pre-norm residual sublayer under a layout."""

    norm: nn.RMSNorm
    name: str
    """Name of this sublayer in a block."""
    groups: tuple[SeparateLinears, SeparateLinears]
    """The groups of linears, in forward order."""

    def __init__(self, spec: Spec | None, layer: int, sizes: dict[str, Any]) -> None:
        super().__init__()
        self.spec = as_spec(spec, sizes)
        self.model, self.layout = self.spec.model, self.spec.layout
        """`initialize` reads these attributes."""
        self.layer = layer

    def add_linears(self, shape: architecture.GroupSpec) -> SeparateLinears:
        """Adds a group's uninitialized linears, as q_proj, k_proj, ..., and its latent gate."""
        prefix = f"layers.{self.layer}"
        for slot in shape.slots:
            name, linear = child_name(slot), cast(nn.Module, None)
            if slot.rank is None:
                (weight,) = _parameters(shape, prefix, "W", slot)
                out_local, in_local = self.spec.local_shape(weight)
                linear = uninitialized_linear(self.spec, in_local, out_local)
                described = {f"{name}.weight": weight}
            else:
                (a,), (b,) = (_parameters(shape, prefix, factor, slot) for factor in "AB")
                # A rank may exceed a shard's width, which `LowRankLinear.__init__` would reject.
                linear = factors = LowRankLinear.__new__(LowRankLinear)
                nn.Module.__init__(factors)
                factors.activation = self.model.latent_act
                for factor, parameter in (("A", a), ("B", b)):
                    out_local, in_local = self.spec.local_shape(parameter)
                    factors.add_module(factor, uninitialized_linear(self.spec, in_local, out_local))
                described = {f"{name}.A.weight": a, f"{name}.B.weight": b}
            self.add_module(name, linear)
            for attribute, parameter in described.items():
                self.describe_child(attribute, parameter, self.layout)
        if architecture.has_latent_gate(self.model, self.layer):
            self.add_module(f"{shape.name}_gate", Gate(self.model, shape, prefix, self.layout))
        group = SeparateLinears(self, self.spec, self.layer, shape)
        group.recompute(NO_RECOMPUTE)
        return group

    def forward(self, x: Tensor, *prev: Tensor, batch: int | None = None, run: "Run | None" = None) -> Any:
        """[B, S, D] -> [B, S, D]: the residual stream after this sublayer, in the layout's shape (`spec.layout`).

        A token-sharded stream (btp-sp, megatron-sp) is [T / p, D], consecutive tokens from all sequences, and `batch` is B.
        A block passes `prev`, the latents of the previous block, and `run`, and gets (x, *latents) if others follow.
        """
        if run is None:
            return run_alone(self.spec, x, batch, self.run)
        (context,) = run.contexts
        flow = Flow(x.reshape(-1, x.shape[-1]), prev)
        interleave([self.run(run.layout, flow, context)])
        x = flow.x.view_as(x)
        return (x, *flow.latents) if flow.latents else x

    def run(self, layout: Layout, flow: Flow, context: Context) -> Iterable[None]:
        """Runs one part of a micro-batch through this sublayer."""
        what = self._changed()
        if is_read(what and f"layers.{self.layer}.{self.name}.{what}", self.spec.tp.size):
            return self.run_fused(layout, flow, context)
        x_BSD = flow.x.view(context.batch, -1, flow.x.shape[-1])
        prev = flow.take(self.taken)
        x_BSD, latents = self.groups[0].policy.local(self.call_modules, x_BSD, prev, context)
        flow.x = x_BSD.flatten(0, 1)
        flow.latents += latents
        return NOTHING_IN_FLIGHT

    @property
    def taken(self) -> int:
        """Number of tensors of the previous block's latents that this sublayer uses."""
        return sum(group.taken for group in self.groups)

    def run_fused(self, layout: Layout, flow: Flow, context: Context) -> Iterator[None]:
        """`run`, with the weights of plain modules."""
        raise NotImplementedError

    def call_modules(self, x_BSD: Tensor, prev: Latents, context: Context) -> tuple[Tensor, Latents]:
        """`run` on one process, with calls of all modules, as in any PyTorch model: (x, latents for the next block)."""
        raise NotImplementedError

    def _changed(self) -> str | None:
        norm = cast(nn.Module, self._modules["norm"])
        if what := difference(norm, nn.RMSNorm, eps=self.model.norm_eps):
            return f"norm {what}"
        return self.groups[0].changed() or self.groups[1].changed()


class Run(NamedTuple):
    """What a decoder passes to its blocks in addition to tensors."""

    layout: Layout
    contexts: Sequence[Context]
    """One per part of the micro-batch."""


def as_spec(spec: Spec | None, sizes: dict[str, Any]) -> Spec:
    """`spec`, or one made from sizes. Raises ConfigError if both are given."""
    if spec is not None and sizes:
        raise ConfigError(f"{next(iter(sizes))} cannot be combined with spec; pass either spec or sizes")
    return spec if spec is not None else Spec(**sizes)


def uninitialized_linear(spec: Spec, in_features: int, out_features: int) -> nn.Linear:
    """A linear that draws no random numbers, as weights come from `initialize` or from a file."""
    linear = nn.utils.skip_init(nn.Linear, in_features, out_features, bias=False, device=spec.device, dtype=spec.dtype)
    assert isinstance(linear, nn.Linear)
    return linear


def add_module(module: FusedModule, spec: Spec, name: str, child: nn.Module, parameter: Parameter) -> None:
    """Adds a child module that holds one parameter, `weight`."""
    module.add_module(name, child)
    module.describe_child(f"{name}.weight", parameter, spec.layout)


def add_norm(module: FusedModule, spec: Spec, parameter: Parameter) -> None:
    """Adds an RMSNorm, which layouts apply together with the projection that follows it."""
    add_module(module, spec, "norm", nn.RMSNorm(spec.local_shape(parameter), eps=spec.model.norm_eps), parameter)


def by_sequence(layout: Layout, x_TD: Tensor, batch: int) -> Tensor:
    """[T, D] as [B, S, D], as users expect it, unless the layout shards tokens."""
    return x_TD.view(batch, -1, x_TD.shape[-1]) if layout.residual_shape(layout.size)[0] == layout.size else x_TD


def once_differentiable(y: Tensor) -> Tensor:
    """Marks a result, whose backward pass raises ConfigError if it shall be differentiable itself."""
    if y.requires_grad and not torch.compiler.is_compiling():
        y.register_hook(_refuse_second_derivatives)
    return y


def _refuse_second_derivatives(_gradient: Tensor) -> None:
    if torch.is_grad_enabled():
        raise ConfigError(
            "create_graph = True is not supported: boost.nn has no second derivatives; use create_graph = False"
        )


def run_alone(
    spec: Spec, x: Tensor, batch: int | None, run: Callable[[Layout, Flow, Context], Iterable[None]]
) -> Tensor:
    """The residual stream after `run` has updated it. Raises ConfigError for a family that passes latents between blocks, or if
    `batch` does not divide the number of tokens."""
    if spec.model.has_latent_gates and spec.model.layers > 1:
        raise ConfigError(
            f"family = '{spec.model.family}' passes latents from block to block; run the blocks through boost.nn.Decoder"
        )
    layout, rows = spec.layout, x.reshape(-1, x.shape[-1])
    batch = batch or (x.shape[0] if x.dim() == 3 else 1)
    # A token-sharded stream has T / p rows.
    tokens = rows.shape[0] * spec.tp.size // layout.residual_shape(spec.tp.size)[0]
    if tokens % batch:
        raise ConfigError(f"batch = {batch} does not divide the {tokens} tokens of x")
    positions_S = torch.arange(tokens // batch, device=x.device)
    with autocast_resolved(x.device, x.dtype) as dtype:
        context = make_context(batch, positions_S, spec.model, dtype)
        flow = Flow(rows.to(dtype))
        interleave([run(layout, flow, context)])
    return once_differentiable(flow.x.view_as(x).to(x.dtype))


def finish(module: "Sublayer | Block", alone: bool) -> None:
    """Initializes and shards the weights of a module if it is not part of a larger one (`alone`)."""
    if alone:
        initialize(module, module.spec.seed)  # type: ignore[arg-type]
        shard_weights(module, module.spec)


class LowRankAttention(Sublayer):
    """x + o(attention(q, k, v)), where q, k, v are projections of RMSNorm(x): grouped-query attention with rotary embeddings.

    `q_proj`, `k_proj`, `v_proj` and `o_proj` are `LowRankLinear` modules (`nn.Linear` with family = "dense"). The norm
    and the residual update belong to the sublayer, because layouts merge them with the projections' collectives.
    """

    name = "attn"

    def __init__(self, spec: Spec | None = None, layer: int = 0, *, _alone: bool = True, **sizes: Any) -> None:
        """Built from a `Spec` or sizes: LowRankAttention(dim=512, heads=8, rank=128). Raises ConfigError if they are invalid."""
        super().__init__(spec, layer, sizes)
        qkv, o, _, _ = architecture.groups(self.model, layer)
        with self.spec.allocation():
            add_norm(self, self.spec, Parameter(f"layers.{layer}.attn_norm", (self.model.dim,), "norm"))
            self.groups = self.add_linears(qkv), self.add_linears(o)
        finish(self, _alone)

    def run_fused(self, layout: Layout, flow: Flow, context: Context) -> Iterator[None]:
        cache = context.caches[self.layer] if context.caches else None
        return attention(layout, flow, context, local_weight(self.norm), *self.groups, cache)

    def call_modules(self, x_BSD: Tensor, prev: Latents, context: Context) -> tuple[Tensor, Latents]:
        qkv, o = self.groups
        projected, latents = qkv.call(call(self.norm, x_BSD), prev[: qkv.taken])
        q, k, v = split_heads(projected, self.model.head_dim, context.batch)
        q, k = rotary(q, k, context.cos, context.sin)
        attended, _ = attend(q, k, v, context, context.caches[self.layer] if context.caches else None)
        (update,), more = o.call(attended.view(*x_BSD.shape[:2], -1), prev[qkv.taken :])
        return x_BSD + update, latents + more


class LowRankMLP(Sublayer):
    """x + down(silu(gate) * up), where gate and up are projections of RMSNorm(x).

    `gate_proj`, `up_proj` and `down_proj` are `LowRankLinear` modules (`nn.Linear` with family = "dense").
    """

    name = "mlp"

    def __init__(self, spec: Spec | None = None, layer: int = 0, *, _alone: bool = True, **sizes: Any) -> None:
        """Built from a `Spec` or sizes: LowRankMLP(dim=512, ffn_dim=1376, rank=128). Raises ConfigError if they are invalid."""
        super().__init__(spec, layer, sizes)
        _, _, gate_up, down = architecture.groups(self.model, layer)
        with self.spec.allocation():
            add_norm(self, self.spec, Parameter(f"layers.{layer}.mlp_norm", (self.model.dim,), "norm"))
            self.groups = self.add_linears(gate_up), self.add_linears(down)
        finish(self, _alone)

    def run_fused(self, layout: Layout, flow: Flow, context: Context) -> Iterator[None]:
        return mlp(layout, flow, local_weight(self.norm), *self.groups, self.model.mlp_silu)

    def call_modules(self, x_BSD: Tensor, prev: Latents, context: Context) -> tuple[Tensor, Latents]:
        gate_up, down = self.groups
        (gate, up), latents = gate_up.call(call(self.norm, x_BSD), prev[: gate_up.taken])
        (update,), more = down.call(gated_product(gate, up, self.model.mlp_silu), prev[gate_up.taken :])
        return x_BSD + update, latents + more


class Block(TransformerBlock):
    """A decoder block: `attn`, then `mlp`."""

    def __init__(self, spec: Spec | None = None, layer: int = 0, *, _alone: bool = True, **sizes: Any) -> None:
        """Built from a `Spec` or sizes: Block(dim=512, heads=8, rank=128). Raises ConfigError if they are invalid."""
        FusedModule.__init__(self)
        self.spec = as_spec(spec, sizes)
        self.model, self.layout = self.spec.model, self.spec.layout
        self.layer_index = layer
        self.attn = LowRankAttention(self.spec, layer, _alone=False)
        self.mlp = LowRankMLP(self.spec, layer, _alone=False)
        self.recompute(POLICIES[self.spec.recompute])
        finish(self, _alone)

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
            if layout.halves:
                name = f"layers.{self.layer_index}.{kind.name}"
                raise ConfigError(f"{name} {what}: overlap = 'halves' does not call it; attach it to the block")
            x = by_sequence(layout, flow.x, context.batch)
            made = sublayer(x, *flow.take(sublayer.taken), run=Run(layout, [context]))
            x, *latents = made if isinstance(made, tuple) else (made,)
            flow.x = x.reshape(flow.x.shape)
            flow.latents += tuple(latents)
        flow.next_block()

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """A decoder passes (layout, streams, contexts). Hooks, wrappers and FSDP get the tensors in the streams."""
        if isinstance(arguments[0], Tensor):
            return super().__call__(*arguments, **options)
        layout, streams, contexts = arguments
        if is_read(difference(self, Block), 1):
            return super().forward(layout, streams, contexts)
        each = zip(streams, contexts, strict=True)
        tensors = [
            x for stream, context in each for x in (by_sequence(layout, stream.x, context.batch), *stream.latents)
        ]
        made = super().__call__(*tensors, run=Run(layout, contexts))
        return _streams(made if isinstance(made, tuple) else (made,), len(contexts))

    def forward(self, *tensors: Tensor, batch: int | None = None, run: Run | None = None) -> Any:  # type: ignore[override]
        """[B, S, D] -> [B, S, D]: the residual stream after the block, as in `LowRankAttention.forward`.

        A decoder passes `run`, and (x, *latents) for each part of the micro-batch.
        """
        if run is not None:
            streams = _streams(tensors, len(run.contexts))
            after = super().forward(run.layout, streams, run.contexts)
            shapes = [x.shape for x in tensors[:: len(tensors) // len(streams)]]
            each = zip(after, shapes, strict=True)
            made = tuple(x for stream, shape in each for x in (stream.x.view(shape), *stream.latents))
            return made if len(made) > 1 else made[0]

        def alone(layout: Layout, flow: Flow, context: Context) -> Iterator[None]:
            (after,) = super(Block, self).forward(layout, [Stream(flow.x, flow.prev_latents)], [context])
            flow.x = after.x
            yield

        (x,) = tensors
        return run_alone(self.spec, x, batch, alone)


def _streams(tensors: Sequence[Tensor], parts: int) -> list[Stream]:
    """(x, *latents) of each part as streams, with x as rows."""
    each = zip(*[iter(tensors)] * (len(tensors) // parts), strict=True)
    return [Stream(x.reshape(-1, x.shape[-1]), tuple(latents)) for x, *latents in each]
