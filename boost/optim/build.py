"""Builds the optimizer of one process's fused parameters from a configuration."""

import pkgutil
from collections.abc import Sequence

from boost.config import Config
from boost.models.fused import FusedParam
from boost.optim.adamw import Optimizer
from boost.parallel.mesh import Mesh


def build_optimizer(fused_params: Sequence[FusedParam], config: Config, mesh: Mesh) -> Optimizer:
    """Builds the optimizer that `config.optim` describes, with zero moments."""
    optimizer: Optimizer = pkgutil.resolve_name(config.optim.builder)(fused_params, config, mesh)
    return optimizer
