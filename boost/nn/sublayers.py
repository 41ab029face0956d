"""`LowRankAttention`, `LowRankMLP`, and `Block`: the sublayers of a decoder as modules, under any layout.

Legend: B sequences, S tokens of each, T = B * S, D width of the residual stream held here: dim, or dim / p where it is sharded.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from boost.config import architecture
from boost.config.architecture import Parameter
from boost.errors import ConfigError
from boost.models.attention import Context, make_context
from boost.models.decoder import TransformerBlock
from boost.models.fused import FusedModule
from boost.models.group import LinearGroup
from boost.models.init import initialize
from boost.models.interface import NO_RECOMPUTE, Done, Layout, Pending, Stream, interleave
from boost.models.sublayers import MLP, Attention
from boost.nn.groups import Gate, SeparateLinears, make_linears
from boost.nn.spec import Spec, autocast_resolved
from boost.nn.weights import local_weight, shard_weights
from boost.parallel.recompute import POLICIES


class Norm(nn.Module):
    """The weight of an RMSNorm, [D]. Layouts apply it together with the projection that follows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}"


class Sublayer(FusedModule):
    """A pre-norm residual sublayer under a layout."""

    norm: Norm

    def __init__(self, spec: Spec | None, layer: int, sizes: dict[str, Any]) -> None:
        super().__init__()
        self.spec = as_spec(spec, sizes)
        self.model, self.layout = self.spec.model, self.spec.layout
        """As `initialize` reads them."""
        self.layer = layer

    def add_norm(self, name: str) -> None:
        """Adds `norm`, which is the parameter `name` of the block."""
        parameter = Parameter(f"layers.{self.layer}.{name}", (self.model.dim,), "norm")
        add_norm(self, self.spec, "norm", parameter)

    def add_linears(self, shape: architecture.GroupSpec) -> SeparateLinears:
        """Adds the linears of a group, and the latent gate that belongs to it."""
        group = make_linears(self, self.spec, self.layer, shape)
        if architecture.has_latent_gate(self.model, self.layer):
            gate = Gate(self.model, shape, f"layers.{self.layer}", self.layout)
            self.add_module(f"{shape.name}_gate", gate)
            group.latent_gate = gate
        return group

    def run(self, x: Tensor, batch: int | None, start: Callable[[Layout, Stream, Context], Pending[Stream]]) -> Tensor:
        """Runs a sublayer or a block by itself on the residual stream, [B, S, D] or [T, D]."""
        return run_alone(self.spec, x, batch, start)


def as_spec(spec: Spec | None, sizes: dict[str, Any]) -> Spec:
    """`spec`, or one made from sizes. Raises ConfigError if both are given."""
    if spec is not None and sizes:
        raise ConfigError(f"{next(iter(sizes))} is part of a Spec; pass either spec or sizes")
    return spec if spec is not None else Spec(**sizes)


def add_norm(module: FusedModule, spec: Spec, attribute: str, parameter: Parameter) -> None:
    """Adds an RMSNorm weight as a child module."""
    (width,) = spec.local_shape(parameter)
    module.add_module(attribute, Norm(width))
    module.describe_child(f"{attribute}.weight", parameter, spec.layout)


def run_alone(
    spec: Spec, x: Tensor, batch: int | None, start: Callable[[Layout, Stream, Context], Pending[Stream]]
) -> Tensor:
    """The residual stream after what `start` computes of it. Raises ConfigError for a family that passes latents between blocks."""
    if spec.model.has_latent_gates and spec.model.layers > 1:
        raise ConfigError(
            f"family = '{spec.model.family}' passes latents from block to block; run the blocks through boost.nn.Decoder"
        )
    layout, rows = spec.layout, x.reshape(-1, x.shape[-1])
    batch = batch or (x.shape[0] if x.dim() == 3 else 1)
    # A token-sharded stream has T / p rows.
    tokens = rows.shape[0] * spec.tp.size // layout.residual_shape(spec.tp.size)[0]
    if tokens % batch:
        raise ConfigError(f"x has rows of {tokens} tokens, which batch = {batch} does not divide")
    positions_S = torch.arange(tokens // batch, device=x.device)
    with autocast_resolved(x.device, x.dtype) as dtype:
        context = make_context(batch, positions_S, spec.model, dtype)
        (after,) = interleave([start(layout, Stream(rows.to(dtype)), context)])
    return after.x.view_as(x).to(x.dtype)


def finish(module: "Sublayer | Block", alone: bool) -> None:
    """Initializes and shards the weights of a module that is not part of a larger one."""
    if alone:
        initialize(module, module.spec.seed)  # type: ignore[arg-type]
        shard_weights(module, module.spec)


class LowRankAttention(Attention, Sublayer):
    """x + o(attention(q, k, v)) of q, k, v = projections of RMSNorm(x): grouped-query attention with rotary positions.

    `q_proj`, `k_proj`, `v_proj` and `o_proj` are `LowRankLinear` modules (`nn.Linear` with family = "dense"). Norm and residual
    update belong to the sublayer, because layouts merge them with the projections' collectives.
    """

    def __init__(self, spec: Spec | None = None, layer: int = 0, *, _alone: bool = True, **sizes: Any) -> None:
        """From a `Spec`, or from sizes: LowRankAttention(dim=512, heads=8, rank=128). Raises ConfigError."""
        Sublayer.__init__(self, spec, layer, sizes)
        self.head_dim, self.layer_index = self.model.head_dim, layer
        qkv, o, _, _ = architecture.groups(self.model, layer)
        with self.spec.allocation():
            self.add_norm("attn_norm")
            self.qkv = self.add_linears(qkv)
            self.o = self.add_linears(o)
        finish(self, _alone)

    @property
    def attn_norm(self) -> Tensor:  # type: ignore[override]
        return local_weight(self.norm)

    def forward(self, x: Tensor, batch: int | None = None) -> Tensor:
        """[B, S, D] -> [B, S, D]: the residual stream after attention, in the shape that the layout gives it (`spec.layout`).

        A token-sharded stream (btp-sp, megatron-sp) is [T / p, D], consecutive tokens of all sequences; `batch` is then B.
        """
        return self.run(x, batch, self.start_attention)


class LowRankMLP(MLP, Sublayer):
    """x + down(silu(gate) * up) of gate, up = projections of RMSNorm(x).

    `gate_proj`, `up_proj` and `down_proj` are `LowRankLinear` modules (`nn.Linear` with family = "dense").
    """

    def __init__(self, spec: Spec | None = None, layer: int = 0, *, _alone: bool = True, **sizes: Any) -> None:
        """From a `Spec`, or from sizes: LowRankMLP(dim=512, ffn_dim=1376, rank=128). Raises ConfigError."""
        Sublayer.__init__(self, spec, layer, sizes)
        self.mlp_silu = self.model.mlp_silu
        _, _, gate_up, down = architecture.groups(self.model, layer)
        with self.spec.allocation():
            self.add_norm("mlp_norm")
            self.gate_up = self.add_linears(gate_up)
            self.down = self.add_linears(down)
        finish(self, _alone)

    @property
    def mlp_norm(self) -> Tensor:  # type: ignore[override]
        return local_weight(self.norm)

    def forward(self, x: Tensor, batch: int | None = None) -> Tensor:
        """[B, S, D] -> [B, S, D]: the residual stream after the MLP, as `LowRankAttention.forward`."""
        return self.run(x, batch, lambda layout, stream, context: self.start_mlp(layout, stream))


class Block(TransformerBlock):
    """A decoder block: `attn`, then `mlp`."""

    def __init__(self, spec: Spec | None = None, layer: int = 0, *, _alone: bool = True, **sizes: Any) -> None:
        """From a `Spec`, or from sizes: Block(dim=512, heads=8, rank=128). Raises ConfigError."""
        FusedModule.__init__(self)
        self.spec = as_spec(spec, sizes)
        self.model, self.layout = self.spec.model, self.spec.layout
        self.layer_index = layer
        self.policy = POLICIES[self.spec.recompute]
        self.attn = LowRankAttention(self.spec, layer, _alone=False)
        self.mlp = LowRankMLP(self.spec, layer, _alone=False)
        finish(self, _alone)

    @property
    def groups(self) -> tuple[LinearGroup, LinearGroup, LinearGroup, LinearGroup]:
        """In forward order."""
        return self.attn.qkv, self.attn.o, self.mlp.gate_up, self.mlp.down

    def start_attention(self, layout: Layout, stream: Stream, context: Context) -> Pending[Stream]:
        return self.attn.start_attention(layout, stream, context)

    def start_mlp(self, layout: Layout, stream: Stream) -> Pending[Stream]:
        return self.mlp.start_mlp(layout, stream)

    def forward(self, x: Any, *rest: Any, batch: int | None = None) -> Any:
        """[B, S, D] -> [B, S, D]: the residual stream after the block, as `LowRankAttention.forward`.

        A decoder calls it with what `TransformerBlock.forward` takes, through `__call__`, so that hooks of FSDP apply.
        """
        if rest:
            return super().forward(x, *rest)
        layout = self.layout.with_options(policy=self.policy if torch.is_grad_enabled() else NO_RECOMPUTE)

        def start(_: Layout, stream: Stream, context: Context) -> Pending[Stream]:
            (after,) = super(Block, self).forward(layout, [stream], [context])
            return Done(after)

        return run_alone(self.spec, x, batch, start)
