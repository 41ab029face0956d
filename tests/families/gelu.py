"""A family that fits on a page (docs/extend.md)."""

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F

import boost
from boost.config.families import CoLAConfig, ModelConfig
from boost.models.latents import Function, Math


@boost.register_family
class GELUConfig(CoLAConfig):
    """CoLA with GELU: y = B gelu(A x)."""

    family: Literal["gelu"] = "gelu"  # type: ignore[assignment]
    latent_act: Literal["gelu"] = "gelu"  # type: ignore[assignment]
    recipe: ClassVar = {**CoLAConfig.recipe, "latent_act": "gelu"}
    math: ClassVar[str] = f"{__name__}:GELU"


class GELU(Math):
    """h = gelu(u)."""

    def __init__(self, model: ModelConfig) -> None:
        self.act = Function(F.gelu, torch.ops.aten.gelu_backward)


boost.elementwise_rule(F.gelu, backward=torch.ops.aten.gelu_backward)
