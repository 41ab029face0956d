"""`gated`: low-rank linears whose latents are gated, y = B (silu(A x) * (G x)), as SwiGLU gates the channels of an MLP."""

from dataclasses import replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

import boost
from boost.config.families import LowRankConfig, ModelConfig
from boost.config.linears import Linear, Size
from boost.models.latents import Act, Math


@boost.register_family
class GatedConfig(LowRankConfig):
    """Low-rank linears with a gate on the latents: y = B (silu(A x) * (G x))."""

    family: Literal["gated"] = "gated"
    latent_act: Literal["gate"] = "gate"
    recipe: ClassVar = {**LowRankConfig.recipe, "latent_act": "gate", "factor_init": "cola"}
    math: ClassVar[str] = f"{__name__}:Gated"
    modeling: ClassVar[str] = f"{__name__}:modeling_gated.py"

    def linear(self, layer: int, size: Size) -> Linear:
        """A and G [r, d_in], B [d_out, r]."""
        pair = super().linear(layer, size)
        (a,) = pair.inner
        return replace(pair, inner=(a, replace(a, name="G")))


class Gated(Math):
    """The product of the two halves of u = [A x, G x]."""

    def __init__(self, model: ModelConfig) -> None:
        self.act = Act(product, product_backward)


def product(u: Tensor) -> Tensor:
    """[T, 2 R] -> silu(a) g, [T, R]."""
    a, g = u.chunk(2, dim=-1)
    return F.silu(a) * g


def product_backward(dh: Tensor, u: Tensor) -> Tensor:
    """Its gradient, [T, 2 R]."""
    a, g = u.chunk(2, dim=-1)
    return torch.cat((torch.ops.aten.silu_backward(dh * g, a), dh * F.silu(a)), dim=-1)
