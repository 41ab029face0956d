"""From a configuration to the optimizer of one process's stored tensors."""

from collections.abc import Sequence

from boost.config import Config
from boost.models.stored import Storage
from boost.optim.adamw import Optimizer, build_adamw
from boost.optim.frobenius import FrobeniusAdamW
from boost.optim.loro import Loro
from boost.optim.muon import Muon
from boost.parallel.mesh import Mesh


def build_optimizer(storages: Sequence[Storage], config: Config, mesh: Mesh) -> Optimizer:
    """The optimizer that `config.optim` names, its moments at zero."""
    optim = config.optim
    if optim.name == "loro":
        return Loro(storages, optim, config.model.dim, mesh)
    if optim.name == "muon":
        return Muon(storages, optim, mesh)
    if optim.frobenius_decay:
        return FrobeniusAdamW(storages, optim, mesh)
    return Optimizer(build_adamw(storages, optim))
