"""`svd`: factors without an activation, y = B (A x)."""

from typing import ClassVar, Literal

from boost.config.families import LowRankConfig


class SVDConfig(LowRankConfig):
    """Low-rank linears without an activation: y = B (A x)."""

    family: Literal["svd"] = "svd"
    modeling: ClassVar[str] = "boost"
