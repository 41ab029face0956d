"""Checks, before anything starts, that the installed torch supports the features that a configuration requests."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_common

from boost.config.schema import ParallelConfig
from boost.errors import ConfigError


def require_torch(parallel: ParallelConfig) -> None:
    """Raises ConfigError if a requested feature needs a newer torch: 2.13 supports both, 2.11 neither."""
    if parallel.sharded and parallel.shard_outer and not SHARDS_OVER_SEVERAL_MESHES:
        raise ConfigError(
            f"parallel.shard_outer = true needs a newer torch than {torch.__version__}, which can only shard all weights of a "
            "block over the same processes (2.13 supports it); set it to false"
        )
    if parallel.pp > 1 and parallel.schedule == "zero-bubble" and not SPLITS_BACKWARD_PASSES:
        raise ConfigError(
            f"parallel.schedule = 'zero-bubble' needs a newer torch than {torch.__version__}, which cannot start a backward "
            "pass at a custom autograd function (2.13 can); use 'interleaved-1f1b'"
        )


class _Identity(torch.autograd.Function):
    """forward: y = x; dgrad: dx = dy. No collective."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


def _splits_backward_passes() -> bool:
    node = _Identity.apply(torch.ones(1, requires_grad=True)).grad_fn
    try:
        return bool(node._input_metadata)
    except RuntimeError:
        return False


SHARDS_OVER_SEVERAL_MESHES = hasattr(_fsdp_common, "ShardPlacementResult")
SPLITS_BACKWARD_PASSES = _splits_backward_passes()
