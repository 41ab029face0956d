"""What a family does to latents: the mathematics between the inner and the outer maps of its linears (`boost.config.linears`)."""

import functools
import operator
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from boost.config.schema import ModelConfig


class Act(Protocol):
    """h = act(u), for all linears of a group or for one of them. Compared by value: one per process for each activation."""

    def forward(self, u_TU: Tensor, /) -> Tensor:
        """u [T, U], the inner maps' results, part by part -> h [T, H], what the outer maps read. Differentiable."""

    @property
    def backward(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        """(dh [T, H], u [T, U]) -> du [T, U]. None: autograd differentiates `forward`, and more than u is saved."""


@dataclass(frozen=True)
class Function:
    """An `Act` made of two functions."""

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor] | None = None

    def __reduce__(self) -> tuple[object, ...]:
        # Models can be pickled, torch's operators cannot: they are found by name.
        is_operator = isinstance(self.backward, torch._ops.OpOverloadPacket)
        return _function, (self.forward, str(self.backward) if is_operator else self.backward)


def _function(forward: Callable[[Tensor], Tensor], backward: Any) -> Function:
    return Function(forward, operator.attrgetter(backward)(torch.ops) if isinstance(backward, str) else backward)


ACTS: dict[str, Act | None] = {"none": None, "silu": Function(F.silu, torch.ops.aten.silu_backward)}
"""Activations by `model.latent_act`; None: the identity."""


class Math:
    """The mathematics of a family, for one group of linears. A family names its own class in `ModelConfig.math`."""

    act: Act | None
    """None: the identity."""

    def __init__(self, model: ModelConfig) -> None:
        self.act = ACTS[model.latent_act]


@functools.lru_cache(maxsize=64)
def math_of(model: ModelConfig) -> Math:
    """The mathematics of a model's family."""
    made: Math = pkgutil.resolve_name(model.math)(model)
    return made
