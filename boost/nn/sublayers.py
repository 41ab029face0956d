"""`LowRankAttention`, `LowRankMLP`, and `Block`: a decoder's sublayers and blocks as modules, under any layout.

The mathematics is the same as in `boost.models`, but the linears in a group are separate modules.

Legend: B sequences, S tokens per sequence, T = B * S, D width of the residual stream held here: dim, or dim / p if it is sharded.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from boost.config import architecture
from boost.config.architecture import Parameter
from boost.errors import ConfigError
from boost.models.attention import Context, make_context
from boost.models.block import TransformerBlock, attention, interleave, mlp
from boost.models.fused import FusedModule, Sharding
from boost.models.group import NO_RECOMPUTE, Flow, LinearGroup, Stream
from boost.models.init import initialize
from boost.models.interface import Layout
from boost.models.kernels import gemms
from boost.models.latent_gate import LatentGate
from boost.nn.linear import LowRankLinear
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


class SeparateLinears(LinearGroup):
    """A `LinearGroup` that looks up its weights in separate modules at each use, because an adapter may have replaced a factor.

    In training, grouped factors A are concatenated for their GEMM, a copy of 3 r d numbers for qkv. Fused parameters need no copy.
    """

    def __init__(self, owner: nn.Module, spec: Spec, layer: int, shape: architecture.GroupSpec) -> None:
        """`owner` has the linears as child modules q_proj, k_proj, ..."""
        self._owner, self._names = owner, [child_name(slot) for slot in shape.slots]
        self.latent_gate: LatentGate | None = None
        self.describe(spec.model, shape, layer, spec.layout)

    @property
    def linears(self) -> list[nn.Module]:
        """The linears, one per slot."""
        return [self._owner.get_submodule(name) for name in self._names]

    @property
    def inner_modules(self) -> list[nn.Module]:
        """Factors A, one per slot."""
        return [cast(LowRankLinear, linear).A for linear in self.linears]

    @property
    def outer_modules(self) -> list[nn.Module]:
        """Factors B, or whole linears in a dense group, one per slot."""
        return [cast(LowRankLinear, linear).B for linear in self.linears] if self.low_rank else self.linears

    @property
    def is_plain(self) -> bool:
        """Whether every weight is used as stored: no module has been replaced (such as by an adapter), and none has a hook."""
        modules = [*(self.inner_modules if self.low_rank else ()), *self.outer_modules]
        return all(type(module) is nn.Linear and not module._forward_hooks for module in modules)

    @property
    def A(self) -> Tensor:  # type: ignore[override]
        weights = [_weight(module) for module in self.inner_modules]
        return weights[0] if len(weights) == 1 else torch.cat(weights)

    @property
    def ranks_here(self) -> Sequence[int]:
        return [cast(nn.Linear, module).out_features for module in self.inner_modules]

    def weights(self) -> list[Tensor]:
        weights = [_weight(module) for module in self.outer_modules]
        return [w if own is None else w.narrow(0, *own) for w, own in zip(weights, self.own_heads, strict=True)]

    # With adapters, modules are called. If all modules are plain linears, grouped and hand-written kernels are used instead.

    @property
    def saves_latents_only(self) -> bool:
        return self._may_save_latents_only and self.is_plain

    @saves_latents_only.setter
    def saves_latents_only(self, value: bool) -> None:
        self._may_save_latents_only = value

    def inner(self, x_TI: Tensor) -> list[Tensor]:
        if not self.low_rank:
            return super().inner(x_TI)
        if self.is_plain:
            if self.is_one_tensor and not torch.is_grad_enabled():
                # During generation, concatenating the A factors for each token would take longer than multiplying by them.
                return [gemms([(x_TI, _weight(module).to(x_TI.dtype).t()) for module in self.inner_modules])]
            return super().inner(x_TI)
        latents = [module(x_TI) for module in self.inner_modules]
        return [torch.cat(latents, dim=-1)] if self.is_one_tensor and len(latents) > 1 else latents

    def project(self, h: Sequence[Tensor]) -> list[Tensor]:
        if self.is_plain:
            return super().project(h)
        if len(h) == 1 and len(self.shape.slots) > 1:
            h = h[0].split(list(self.ranks_here), dim=-1)
        return [module(h_Tr) for module, h_Tr in zip(self.outer_modules, h, strict=True)]

    def dense(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        if self.is_plain:
            return super().dense(inputs)
        return [module(inputs[0]) for module in self.outer_modules]


def _weight(module: nn.Module) -> Tensor:
    if type(module) is not nn.Linear:
        raise RuntimeError(
            f"a factor is a {type(module).__name__}, but layouts over several TP ranks need an nn.Linear; merge adapters first"
        )
    return local_weight(module)


def child_name(slot: architecture.Slot) -> str:
    """Name of a slot's child module, such as q_proj for attn.q."""
    return f"{slot.name.partition('.')[2]}_proj"


def _parameters(shape: architecture.GroupSpec, prefix: str, factor: str, slot: architecture.Slot) -> list[Parameter]:
    return [p for p in shape.parameters(prefix, factor) if p.name == f"{prefix}.{slot.name}.{factor}"]


class Weight(nn.Module):
    """The weight of an RMSNorm, [D], which layouts apply together with the projection that follows it, or the weight of the
    embedding or the head: all V rows, or only this process's rows."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))

    def extra_repr(self) -> str:
        return ", ".join(map(str, self.weight.shape))


class Sublayer(FusedModule):
    """A pre-norm residual sublayer under a layout."""

    norm: Weight

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
            name = child_name(slot)
            if slot.rank is None:
                (weight,) = _parameters(shape, prefix, "W", slot)
                out_local, in_local = self.spec.local_shape(weight)
                linear: nn.Module = nn.Linear(in_local, out_local, bias=False)
                described = {f"{name}.weight": weight}
            else:
                (a,), (b,) = (_parameters(shape, prefix, factor, slot) for factor in "AB")
                # A rank may exceed a shard's width, which `LowRankLinear.__init__` would reject.
                linear = LowRankLinear.__new__(LowRankLinear)
                nn.Module.__init__(linear)
                linear.activation = self.model.latent_act
                for factor, parameter in (("A", a), ("B", b)):
                    out_local, in_local = self.spec.local_shape(parameter)
                    linear.add_module(factor, nn.Linear(in_local, out_local, bias=False))
                described = {f"{name}.A.weight": a, f"{name}.B.weight": b}
            self.add_module(name, linear)
            for attribute, parameter in described.items():
                self.describe_child(attribute, parameter, self.layout)
        group = SeparateLinears(self, self.spec, self.layer, shape)
        if architecture.has_latent_gate(self.model, self.layer):
            gate = Gate(self.model, shape, prefix, self.layout)
            self.add_module(f"{shape.name}_gate", gate)
            group.latent_gate = gate
        group.recompute(NO_RECOMPUTE)
        return group


def as_spec(spec: Spec | None, sizes: dict[str, Any]) -> Spec:
    """`spec`, or one made from sizes. Raises ConfigError if both are given."""
    if spec is not None and sizes:
        raise ConfigError(f"{next(iter(sizes))} cannot be combined with spec; pass either spec or sizes")
    return spec if spec is not None else Spec(**sizes)


def add_weight(module: FusedModule, spec: Spec, attribute: str, parameter: Parameter) -> None:
    """Adds the weight of a norm, of the embedding or of the head as a child module."""
    module.add_module(attribute, Weight(*spec.local_shape(parameter)))
    module.describe_child(f"{attribute}.weight", parameter, spec.layout)


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
    return flow.x.view_as(x).to(x.dtype)


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

    def __init__(self, spec: Spec | None = None, layer: int = 0, *, _alone: bool = True, **sizes: Any) -> None:
        """Built from a `Spec` or sizes: LowRankAttention(dim=512, heads=8, rank=128). Raises ConfigError if they are invalid."""
        Sublayer.__init__(self, spec, layer, sizes)
        qkv, o, _, _ = architecture.groups(self.model, layer)
        with self.spec.allocation():
            add_weight(self, self.spec, "norm", Parameter(f"layers.{layer}.attn_norm", (self.model.dim,), "norm"))
            self.qkv = self.add_linears(qkv)
            self.o = self.add_linears(o)
        finish(self, _alone)

    def forward(self, x: Tensor, batch: int | None = None) -> Tensor:
        """[B, S, D] -> [B, S, D]: the residual stream after attention, in the layout's shape (`spec.layout`).

        A token-sharded stream (btp-sp, megatron-sp) is [T / p, D], consecutive tokens from all sequences, and `batch` is B.
        """
        return run_alone(self.spec, x, batch, self.run)

    def run(self, layout: Layout, flow: Flow, context: Context) -> Iterator[None]:
        """Runs one part of a micro-batch through this sublayer."""
        cache = context.caches[self.layer] if context.caches else None
        return attention(layout, flow, context, local_weight(self.norm), self.qkv, self.o, cache)


class LowRankMLP(Sublayer):
    """x + down(silu(gate) * up), where gate and up are projections of RMSNorm(x).

    `gate_proj`, `up_proj` and `down_proj` are `LowRankLinear` modules (`nn.Linear` with family = "dense").
    """

    def __init__(self, spec: Spec | None = None, layer: int = 0, *, _alone: bool = True, **sizes: Any) -> None:
        """Built from a `Spec` or sizes: LowRankMLP(dim=512, ffn_dim=1376, rank=128). Raises ConfigError if they are invalid."""
        Sublayer.__init__(self, spec, layer, sizes)
        _, _, gate_up, down = architecture.groups(self.model, layer)
        with self.spec.allocation():
            add_weight(self, self.spec, "norm", Parameter(f"layers.{layer}.mlp_norm", (self.model.dim,), "norm"))
            self.gate_up = self.add_linears(gate_up)
            self.down = self.add_linears(down)
        finish(self, _alone)

    def forward(self, x: Tensor, batch: int | None = None) -> Tensor:
        """[B, S, D] -> [B, S, D]: the residual stream after the MLP, as in `LowRankAttention.forward`."""
        return run_alone(self.spec, x, batch, lambda layout, flow, _: self.run(layout, flow))

    def run(self, layout: Layout, flow: Flow) -> Iterator[None]:
        """Runs one part of a micro-batch through this sublayer."""
        return mlp(layout, flow, local_weight(self.norm), self.gate_up, self.down, self.model.mlp_silu)


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
        return self.attn.qkv, self.attn.o, self.mlp.gate_up, self.mlp.down

    def run(self, layout: Layout, flow: Flow, context: Context) -> Iterator[None]:
        yield from self.attn.run(layout, flow, context)
        yield from self.mlp.run(layout, flow)
        flow.next_block()

    def forward(self, x: Any, *rest: Any, batch: int | None = None) -> Any:
        """[B, S, D] -> [B, S, D]: the residual stream after the block, as in `LowRankAttention.forward`.

        A decoder calls the block with the arguments of `TransformerBlock.forward`, through `__call__`, so that FSDP's hooks run.
        """
        if rest:
            return super().forward(x, *rest)

        def run(layout: Layout, flow: Flow, context: Context) -> Iterator[None]:
            (after,) = super(Block, self).forward(layout, [Stream(flow.x, flow.prev_latents)], [context])
            flow.x = after.x
            yield

        return run_alone(self.spec, x, batch, run)
