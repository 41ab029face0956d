"""`cola`: factors with an activation between them, y = B silu(A x) (CoLA, arXiv 2502.10940)."""

from typing import ClassVar, Literal

from boost.config.families import LowRankConfig
from boost.config.section import Values


class CoLAConfig(LowRankConfig):
    """Low-rank linears with an activation on the latents (CoLA): y = B silu(A x)."""

    family: Literal["cola"] = "cola"
    modeling: ClassVar[str] = "boost"
    recipe: ClassVar[Values] = {"mlp_silu": True, "latent_act": "silu", "factor_init": "cola"}
