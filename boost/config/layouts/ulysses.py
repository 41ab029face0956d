"""`ulysses`: whole weights, tokens sharded; only attention crosses, as heads, by all-to-all (DeepSpeed Ulysses, arXiv 2309.14509).

residual x [T/p, d]; all weights whole, their gradients sums over tokens
forward a block:   q, k, v of own tokens -> A2A -> own heads of all tokens -> attention -> A2A;  the MLP local
backward:          the same two
"""

from typing import ClassVar, Literal

from boost.config.architecture import Slot
from boost.config.layouts.crossings import CrossingSpec
from boost.config.schema import ModelConfig, ParallelConfig


class UlyssesConfig(ParallelConfig):
    """Any family: whole weights, tokens sharded, heads exchanged around attention (arXiv 2309.14509)."""

    layout: Literal["ulysses"] = "ulysses"


class UlyssesSpec(CrossingSpec):
    """Everything crosses as heads."""

    config: ClassVar[type[ParallelConfig]] = UlyssesConfig
    runtime = "boost.parallel.layouts.ulysses:Ulysses"
    low_rank: ClassVar[bool | None] = None

    def outdone_by(self, model: ModelConfig) -> str:
        """Where there are latents, the narrower of both crosses under `btp-cp`."""
        return "btp-cp" if model.low_rank else ""

    def crosses_as_heads(self, slot: Slot, model: ModelConfig, parallel: ParallelConfig) -> bool:
        return True
