"""`dense`: whole weights, y = W x."""

from typing import ClassVar, Literal

from boost.config.families import ModelConfig


class DenseConfig(ModelConfig):
    """Full-rank linears: y = W x."""

    family: Literal["dense"] = "dense"
    modeling: ClassVar[str] = "transformers"
