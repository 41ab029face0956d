"""AdamW over stored parameters: torch's fused implementation, in weight-decay groups, with state that exists from the start."""

from collections.abc import Sequence

import torch

from boost.config.schema import OptimConfig
from boost.models.stored import Storage

MOMENTS = ("exp_avg", "exp_avg_sq")


def build_adamw(storages: Sequence[Storage], optim: OptimConfig) -> torch.optim.AdamW:
    """torch's fused AdamW. Every parameter of a linear decays; embedding, head and norms too if optim.decay_on = 'all'."""

    def decays(storage: Storage) -> bool:
        return optim.decay_on == "all" or storage.parts[0].parameter.role.startswith(("enter.", "kv.", "leave."))

    groups = [
        {"params": [s.tensor for s in storages if decays(s)], "weight_decay": optim.weight_decay},
        {"params": [s.tensor for s in storages if not decays(s)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        fused=True,
    )
    for storage in storages:  # torch makes state at the first step, too late to load a checkpoint into it
        parameter = storage.tensor
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            **{moment: torch.zeros_like(parameter, memory_format=torch.preserve_format) for moment in MOMENTS},
        }
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets the rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def update_count(optimizer: torch.optim.Optimizer) -> int:
    """Number of updates that the optimizer has made (skipped steps are not among them)."""
    return int(next(iter(optimizer.state.values()))["step"].item())


def set_update_count(optimizer: torch.optim.Optimizer, count: int) -> None:
    """Sets the number of updates, on which AdamW's bias correction depends."""
    for state in optimizer.state.values():
        state["step"].fill_(count)
