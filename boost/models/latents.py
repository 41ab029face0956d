"""What a family does to latents: the mathematics between the inner and the outer maps of its linears (`boost.config.linears`)."""

import functools
import operator
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from boost.config.schema import ModelConfig


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


class Math:
    """The mathematics of a family, for all linears of a model. A family names its own class in `ModelConfig.math`."""

    act: Act | None
    """None: the identity."""

    def __init__(self, model: ModelConfig) -> None:
        self.act = ACTS[model.latent_act]

    def act_for(self, widths: tuple[int, ...]) -> Act | None:
        """`act`, for a u whose parts (each inner map's results, then selected inputs) have these widths in this process."""
        return self.act


@functools.lru_cache(maxsize=64)
def math_of(model: ModelConfig) -> Math:
    """The mathematics of a model's family."""
    made: Math = pkgutil.resolve_name(model.math)(model)
    return made


@functools.lru_cache(maxsize=4096)
def act_of(model: ModelConfig, widths: tuple[int, ...]) -> Act | None:
    """`Math.act_for`: one object for equal widths, because compiled code and traces compare it."""
    return math_of(model).act_for(widths)
