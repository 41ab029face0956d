"""What a family does to latents: the mathematics between the inner and the outer maps of its linears (`boost.config.linears`)."""

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from boost.config.architecture import GroupSpec
from boost.config.schema import ModelConfig
from boost.config.section import resolved
from boost.errors import ConfigError
from boost.models.fused import FusedModule, Sharding


@dataclass(frozen=True)
class Act:
    """h = act(u), made of plain functions and operators of torch.ops.aten.

    It is given several linears side by side, or a shard of them: [T, U] holds the first inner map of every linear, then the second,
    and so on. So h[i] may depend only on u[i] of each map, and the maps of a linear must have one width.
    """

    forward: Callable[[Tensor], Tensor]
    """u [T, U], the inner maps' results -> h [T, H], what B reads. Differentiable."""
    backward: Callable[[Tensor, Tensor], Tensor] | None = None
    """(dh [T, H], u [T, U]) -> du [T, U]. None: autograd differentiates `forward`, and more than u is saved."""

    def __repr__(self) -> str:
        return getattr(self.forward, "__name__", str(self.forward))

    def __reduce__(self) -> tuple[object, ...]:
        # Models can be pickled, torch's operators cannot: they are found by name.
        is_operator = isinstance(self.backward, torch._ops.OpOverloadPacket)
        return _act, (self.forward, str(self.backward) if is_operator else self.backward)


def _act(forward: Callable[[Tensor], Tensor], backward: Any) -> Act:
    return Act(forward, operator.attrgetter(backward)(torch.ops) if isinstance(backward, str) else backward)


ACTS: dict[str, Act | None] = {"none": None, "silu": Act(F.silu, torch.ops.aten.silu_backward)}
"""Activations by `model.latent_act`; None: the identity."""


class Mixer(FusedModule):
    """What a family does to the latents of linears that share an input before act, and to their outputs: their extra parameters
    (`Linear.extra`), and the widths of their latents."""

    def __init__(self, math: "Math", shape: GroupSpec, before: GroupSpec | None, prefix: str, layout: Sharding) -> None:
        """`before`: the same group of the previous block, if it carries its latents or its outputs to this one."""
        super().__init__()
        self.math, self.whole_widths = math, shape.down_widths
        widths, prev = shape.down_widths, before.up_widths if before else ()
        shards = layout.size if layout.placement("enter.inner").dim == 0 else 1
        self.widths, self.prev_widths = (tuple(width // shards for width in of_slots) for of_slots in (widths, prev))
        """Width of each slot's shard on this process, in this block and in the one before."""
        self.names = [slot.short for slot in shape.slots]
        for name, parameters in shape.extras(prefix).items():
            self.add_fused_param(name, parameters, layout)

    def forward(self, u_TR: Tensor, prev_TR: Tensor | None = None) -> Tensor:
        """u, mixed and normalized, if this process holds whole latents."""
        prev = () if prev_TR is None else prev_TR.split(self.prev_widths, dim=-1)
        return self.math.normalize(self.math.mix(u_TR, prev, self), None, self).to(u_TR.dtype)

    def of(self, name: str, slot: int) -> Tensor:
        """This process's rows of the parameter of one slot, in the dtype that it is stored in."""
        parameter: Tensor = getattr(self, f"{name}_{self.names[slot]}")
        return parameter

    def joined(self, name: str) -> Tensor:
        """The same of all slots, for a parameter that `is_joined`."""
        parameter: Tensor = getattr(self, name)
        return parameter


class Math:
    """The mathematics of a family, for all linears of a model. A family names its own class in `ModelConfig.math`.

    For linears with extra parameters, or with latents from the previous block, u = normalize(mix(u)) comes before act. Legend: R
    latent width of all slots side by side, or of this process's shard of each.
    """

    act: Act | None
    """None: the identity."""

    def __init__(self, model: ModelConfig) -> None:
        if model.latent_act not in ACTS:
            raise ConfigError(
                f"model.latent_act = '{model.latent_act}' is not implemented; valid values: {', '.join(ACTS)}"
            )
        self.act = ACTS[model.latent_act]

    def act_for(self, widths: tuple[int, ...]) -> Act | None:
        """`act`, for a u whose parts (each inner map's results, then selected inputs) have these widths in this process."""
        return self.act

    def mix(self, u_TR: Tensor, prev: Sequence[Tensor], mixer: Mixer) -> Tensor:
        """Combines u with the previous block's latents, if any: one [T, r] per slot, whole if `Linear.mixes_elements`. u never has
        to be whole, so an element may depend only on the same element of u."""
        raise ConfigError(
            f"{type(self).__name__} has no `mix`, but its linears have extra parameters or latents to mix"
        )

    def sums(self, mixed_TR: Tensor, mixer: Mixer) -> Tensor:
        """[T, `Linear.sums` of every slot], fp64: what `normalize` needs of whole latents, from this process's shard."""
        raise ConfigError(f"{type(self).__name__} has no `sums`, but its linears declare some")

    def normalize(self, mixed_TR: Tensor, sums: Tensor | None, mixer: Mixer) -> Tensor:
        """`sums`: over all shards; None if this process has whole latents. Without `Linear.sums`, it is always None, and an element
        may depend only on the same element."""
        return mixed_TR

    def finish(self, y: Sequence[Tensor], prev: Sequence[Tensor], mixer: Mixer) -> Sequence[Tensor]:
        """Combines the outputs, [T, O] per slot, with those of the previous block, if any (none in the first). Both are this
        process's shards, so an element may depend only on the same element of each."""
        raise NotImplementedError(f"{type(self).__name__} has no `finish`, but its linears have outputs to combine")


@functools.lru_cache(maxsize=64)
def math_of(model: ModelConfig) -> Math:
    """The mathematics of a model's family."""
    made: Math = resolved(model.math, f"math of model.family = '{model.family}'")(model)
    return made


@functools.lru_cache(maxsize=4096)
def act_of(model: ModelConfig, widths: tuple[int, ...]) -> Act | None:
    """`Math.act_for`: one object for equal widths, because compiled code and traces compare it."""
    return math_of(model).act_for(widths)
