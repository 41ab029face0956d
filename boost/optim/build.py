"""From a configuration to the optimizer of one process's stored tensors."""

import pkgutil
from collections.abc import Sequence

from boost.config import Config
from boost.models.stored import Storage
from boost.optim.adamw import Optimizer
from boost.parallel.mesh import Mesh


def build_optimizer(storages: Sequence[Storage], config: Config, mesh: Mesh) -> Optimizer:
    """The optimizer that `config.optim` describes, its moments at zero."""
    optimizer: Optimizer = pkgutil.resolve_name(config.optim.builder)(storages, config, mesh)
    return optimizer
