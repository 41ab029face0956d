"""The linears of a group as separate modules. The mathematics is `boost.models.group`'s."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from boost.config import architecture
from boost.models.fused import FusedModule
from boost.models.group import LinearGroup, own_head
from boost.models.interface import Layout, Saved
from boost.models.latent_gate import LatentGate
from boost.models.linear import gemms
from boost.nn.linear import LowRankLinear
from boost.nn.spec import Spec
from boost.nn.weights import local_weight


class Gate(LatentGate):
    """A latent gate with a tensor for each parameter. Sharded along dim 0, a tensor of several parameters would be a DTensor whose
    rows are in an order of their own."""

    def add_fused_param(self, attribute: str, parameters: Sequence[architecture.Parameter], layout: Layout) -> None:
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
    """A `LinearGroup` whose weights belong to modules of their own, looked up at each use: an adapter may have replaced a factor.

    For training, grouped factors A are concatenated for their GEMM, a copy of 3 r d numbers for qkv; fused parameters need none.
    """

    def __init__(self, owner: nn.Module, spec: Spec, layer: int, shape: architecture.GroupSpec) -> None:
        """`owner` has the linears as children q_proj, k_proj, ..."""
        model, layout = spec.model, spec.layout
        self.shape, self.low_rank, self.latent_act = shape, model.low_rank, model.latent_act
        self._owner, self._names = owner, [child_name(slot) for slot in shape.slots]
        self.latent_gate: LatentGate | None = None
        self.feeds_next = model.has_latent_gates and layer + 1 < model.layers
        roles = [parameter.role for parameter in shape.parameters("", "B" if self.low_rank else "W")]
        self.own_heads = [
            own_head(model, layout, slot, layout.placement(role).dim is None)
            for slot, role in zip(shape.slots, roles, strict=True)
        ]

    @property
    def linears(self) -> list[nn.Module]:
        """One a slot."""
        return [self._owner.get_submodule(name) for name in self._names]

    @property
    def inner(self) -> list[nn.Module]:
        """Factors A, one a slot."""
        return [cast(LowRankLinear, linear).A for linear in self.linears]

    @property
    def outer(self) -> list[nn.Module]:
        """Factors B, or whole linears of a dense group, one a slot."""
        return [cast(LowRankLinear, linear).B for linear in self.linears] if self.low_rank else self.linears

    @property
    def is_plain(self) -> bool:
        """Whether every weight is used as it is stored: no module was replaced, such as by an adapter, and none has a hook."""
        return all(type(module) is nn.Linear and not module._forward_hooks for module in self._modules())

    def _modules(self) -> list[nn.Module]:
        return [*(self.inner if self.low_rank else ()), *self.outer]

    @property
    def A(self) -> Tensor:  # type: ignore[override]
        weights = [_weight(module) for module in self.inner]
        return weights[0] if len(weights) == 1 else torch.cat(weights)

    @property
    def ranks_here(self) -> Sequence[int]:
        return [cast(nn.Linear, module).out_features for module in self.inner]

    def stored_outer(self) -> list[Tensor]:
        return [_weight(module) for module in self.outer]

    # With adapters, modules are called. Where all are plain linears, grouped and hand-written kernels apply.

    @property
    def has_private_latents(self) -> bool:
        # torch.compile does not evaluate a property of super() (2.13 and 2.15 take it for true, without an error).
        return self.latent_gate is None and not self.feeds_next and self.is_plain

    def down_proj(self, x_TI: Tensor, grouped: bool) -> list[Tensor]:
        if self.is_plain:
            if grouped and not torch.is_grad_enabled():
                # During generation, concatenating A for each token would take longer than its product.
                return [gemms([(x_TI, _weight(module).to(x_TI.dtype).t()) for module in self.inner])]
            return super().down_proj(x_TI, grouped)
        latents = [module(x_TI) for module in self.inner]
        return [torch.cat(latents, dim=-1)] if grouped and len(latents) > 1 else latents

    def up_proj(self, h: Sequence[Tensor]) -> list[Tensor]:
        if self.is_plain:
            return super().up_proj(h)
        if len(h) == 1 and len(self.shape.slots) > 1:
            h = h[0].split(list(self.ranks_here), dim=-1)
        return [module(h_Tr) for module, h_Tr in zip(self.outer, h, strict=True)]

    def dense(self, saved: Saved, grouped: bool) -> list[Tensor]:
        if self.is_plain:
            return super().dense(saved, grouped)
        return [module(saved.tensors[0]) for module in self.outer]


def _weight(module: nn.Module) -> Tensor:
    if type(module) is not nn.Linear:
        raise RuntimeError(
            f"a factor is a {type(module).__name__}, and layouts over several TP ranks need plain weights; merge adapters first"
        )
    return local_weight(module)


def make_linears(module: FusedModule, spec: Spec, layer: int, shape: architecture.GroupSpec) -> SeparateLinears:
    """Adds the linears of a group to `module` as q_proj, k_proj, ..., uninitialized, and returns the group."""
    prefix = f"layers.{layer}"
    for slot in shape.slots:
        name = child_name(slot)
        if slot.rank is None:
            (weight,) = _parameters(shape, prefix, "W", slot)
            out_local, in_local = spec.local_shape(weight)
            linear: nn.Module = nn.Linear(in_local, out_local, bias=False)
            described = {f"{name}.weight": weight}
        else:
            (a,), (b,) = (_parameters(shape, prefix, factor, slot) for factor in "AB")
            linear = _factors(spec.local_shape(a), spec.local_shape(b), spec.model.latent_act)
            described = {f"{name}.A.weight": a, f"{name}.B.weight": b}
        module.add_module(name, linear)
        for attribute, parameter in described.items():
            module.describe_child(attribute, parameter, spec.layout)
    return SeparateLinears(module, spec, layer, shape)


def child_name(slot: architecture.Slot) -> str:
    """q_proj for attn.q."""
    return f"{slot.name.partition('.')[2]}_proj"


def _factors(a: tuple[int, ...], b: tuple[int, ...], activation: str) -> LowRankLinear:
    """Shards of factors: a rank may exceed the width of a shard, which a linear of its own may not."""
    made = LowRankLinear.__new__(LowRankLinear)
    nn.Module.__init__(made)
    made.activation = activation
    made.A = nn.Linear(a[1], a[0], bias=False)
    made.B = nn.Linear(b[1], b[0], bias=False)
    return made


def _parameters(
    shape: architecture.GroupSpec, prefix: str, factor: str, slot: architecture.Slot
) -> list[architecture.Parameter]:
    return [each for each in shape.parameters(prefix, factor) if each.name == f"{prefix}.{slot.name}.{factor}"]
