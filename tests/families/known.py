"""The families that `tests/families` runs: every registered one, the examples', and one that fits on a page."""

import sys
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F

import boost
from boost.config.families import CoLAConfig, ModelConfig
from boost.models.latents import Function, Math

EXAMPLES = Path(__file__).parents[2] / "examples" / "families"
for example in ("gated",):
    sys.path.insert(0, str(EXAMPLES / example))


class GELU(Math):
    """h = gelu(u)."""

    def __init__(self, model: ModelConfig) -> None:
        self.act = Function(F.gelu, torch.ops.aten.gelu_backward)


class GELUConfig(CoLAConfig):
    """CoLA with GELU: y = B gelu(A x)."""

    family: Literal["gelu"] = "gelu"  # type: ignore[assignment]
    latent_act: Literal["gelu"] = "gelu"  # type: ignore[assignment]
    recipe: ClassVar = {**CoLAConfig.recipe, "latent_act": "gelu"}
    math: ClassVar[str] = f"{__name__}:GELU"


boost.register_family(GELUConfig)
import gated_bottleneck  # noqa: E402, F401

FAMILIES = ("gelu", "gated")
