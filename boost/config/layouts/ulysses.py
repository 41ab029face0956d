"""`ulysses`: replicated weights, sharded tokens; all-to-alls of heads around attention (DeepSpeed Ulysses, arXiv 2309.14509).

residual x [T/p, d]; all weights replicated, their gradients partial sums over tokens
forward per block:   q, k, v of local tokens -> A2A -> local heads of all tokens -> attention -> A2A;  the MLP is local
backward:            the same two
"""

from typing import ClassVar, Literal

from boost.config.architecture import Slot
from boost.config.layouts.crossings import CrossingSpec
from boost.config.schema import ModelConfig, ParallelConfig


class UlyssesConfig(ParallelConfig):
    """Any family: replicated weights, sharded tokens, heads exchanged around attention (arXiv 2309.14509)."""

    layout: Literal["ulysses"] = "ulysses"


class UlyssesSpec(CrossingSpec):
    """q, k, v and o all exchange heads."""

    config: ClassVar[type[ParallelConfig]] = UlyssesConfig
    runtime = "boost.parallel.layouts.ulysses:Ulysses"
    low_rank: ClassVar[bool | None] = None

    def superseded_by(self, model: ModelConfig) -> str:
        """`btp-cp` for low-rank families: it communicates whichever of latents and heads is narrower."""
        return "btp-cp" if model.low_rank else ""

    def crosses_as_heads(self, slot: Slot, model: ModelConfig, parallel: ParallelConfig) -> bool:
        return True
