"""`megatron-sp`: `megatron` with a token-sharded residual stream ("sequence parallelism", arXiv 2205.05198).

residual x [T/p, d]; weights sharded like `megatron`
forward per block:   AG(d) RS(d) AG(d) RS(d)
backward:            AG(d) RS(d) AG(d) RS(d), and the gradients of the norms once per optimizer step
"""

from typing import ClassVar, Literal

from boost.config.layouts.megatron import MegatronSpec
from boost.config.layouts.spec import EXCHANGE, GATHER, PARTIAL, SCATTER_SUM, Placement
from boost.config.schema import ParallelConfig


class MegatronSPConfig(ParallelConfig):
    """Dense: megatron with a token-sharded residual stream (arXiv 2205.05198)."""

    layout: Literal["megatron-sp"] = "megatron-sp"


class MegatronSPSpec(MegatronSpec):
    """Token-sharded residual stream, all-gathers and reduce-scatters of width d."""

    config = MegatronSPConfig
    runtime = "boost.parallel.layouts.megatron:MegatronSP"
    residual = "tokens"
    placements: ClassVar[dict[str, Placement]] = {**MegatronSpec.placements, "norm": PARTIAL, "final_norm": PARTIAL}
    embed_comms = (EXCHANGE,)
    head_comms = (GATHER,)
    in_comm = GATHER
    out_comm = SCATTER_SUM
