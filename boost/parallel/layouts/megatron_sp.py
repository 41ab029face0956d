"""Runtime of `megatron-sp`: `megatron` on a token-sharded residual stream."""

from boost.parallel.layouts.base import TokenSharded
from boost.parallel.layouts.megatron import Megatron


class MegatronSP(TokenSharded, Megatron):
    """All-gathers before a group's first linears, reduce-scatters after its last."""
