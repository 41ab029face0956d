"""The optimizer interface and AdamW: torch's fused version with weight-decay groups and state that exists from the start."""

import pkgutil
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from boost.config import Config
from boost.config.optimizers import OptimConfig
from boost.models.fused import FusedParam
from boost.parallel.mesh import Mesh

MOMENTS = ("exp_avg", "exp_avg_sq")

State = dict[Tensor, dict[str, Tensor]]
"""Moments for each tensor by name, each with the shape of the local shard."""

Part = dict[Tensor, tuple[int, dict[str, Tensor]]]
"""For each stored tensor: (index of the first row, moments for the rows from that one on, by name)."""


def decays(fused: FusedParam, optim: OptimConfig) -> bool:
    """Whether a stored tensor has weight decay. Every map of a linear does; its extra parameters and biases, the embedding,
    head and norms do only if optim.decay_on = 'all'."""
    role = fused.slices[0].parameter.role
    return optim.decay_on == "all" or role.startswith(("enter.", "q.", "kv.", "o.", "leave."))


def build_adamw(fused_params: Sequence[FusedParam], optim: OptimConfig) -> torch.optim.AdamW:
    """torch's fused AdamW over the local shards of fused parameters."""
    groups = [
        {"params": [f.tensor for f in fused_params if decays(f, optim) == decaying], "weight_decay": weight_decay}
        for decaying, weight_decay in ((True, optim.weight_decay), (False, 0.0))
    ]
    optimizer = fused_adamw([group for group in groups if group["params"]], optim)
    for fused in fused_params:
        optimizer.state[fused.tensor] = fresh_state(fused.tensor, zeros(fused.tensor, MOMENTS))
    return optimizer


def fused_adamw(groups: Iterable[dict[str, object]], optim: OptimConfig) -> torch.optim.AdamW:
    """torch's fused AdamW for these groups, with no state yet."""
    return torch.optim.AdamW(groups, lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, fused=True)


def zeros(param: Tensor, names: Iterable[str]) -> dict[str, Tensor]:
    """Zero moments for a tensor. torch would create them in the first step, too late for loading a checkpoint."""
    return {name: torch.zeros_like(param, memory_format=torch.preserve_format, requires_grad=False) for name in names}


def fresh_state(param: Tensor, moments: dict[str, Tensor]) -> dict[str, Tensor]:
    """torch's state for a parameter: step count and moments."""
    return {"step": torch.zeros((), dtype=torch.float32, device=param.device), **moments}


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = rate


class Optimizer:
    """The optimizer interface for training, checkpoints and memory measurement. This base class is AdamW."""

    name = "adamw"
    """Value of optim.name that selects this optimizer."""
    division: object = None
    """How `parts` are divided among processes, if that changes during a run; equal on all processes."""
    conflict: int | None = None
    """dp rank of a process whose copies are known to have differed from this one's (`boost.train.replicas`)."""

    def __init__(self, adamw: torch.optim.AdamW) -> None:
        self.adamw = adamw
        self.moments: State = {
            param: {name: value for name, value in state.items() if name != "step"}
            for param, state in adamw.state.items()
        }
        self._updates = 0

    def step(self, number: int, rate: float) -> None:
        """Performs the update of training step `number` (0-based) at this learning rate."""
        set_learning_rate(self.adamw, rate)
        self.adamw.step()
        self._updates += 1

    @property
    def takes_tensors(self) -> bool:
        """Whether `launch` can replace `step`. False if a subclass overrides `step`, which may read numbers on the host."""
        return type(self).step is Optimizer.step

    def launch(self, rate: float, divisor: Tensor, skip: Tensor) -> None:
        """Performs the update with gradients divided by `divisor`, or skips the update if `skip` is 1.

        Both are scalars on the parameters' device, and the host does not read them. Gradients are divided in place. If the
        update turns out to have been skipped, call `take_back`.
        """
        set_learning_rate(self.adamw, rate)
        if wide := [p.grad for p in self.moments if p.grad is not None and p.dtype == torch.float64]:
            torch._foreach_div_(wide, divisor)
        scale = None if wide else divisor.float()  # torch's kernel reads fp32
        self.adamw.grad_scale, self.adamw.found_inf = scale, skip  # type: ignore[attr-defined]
        try:
            self.adamw.step()
        finally:
            del self.adamw.grad_scale, self.adamw.found_inf  # type: ignore[attr-defined]
        self._updates += 1

    def take_back(self) -> None:
        """Removes the latest `launch`, which was skipped, from the count. The device-side step counts are already correct."""
        self._updates -= 1

    @property
    def updates(self) -> int:
        """Number of updates since the moments were zero, for AdamW's bias correction. Excludes skipped steps."""
        return self._updates

    @updates.setter
    def updates(self, count: int) -> None:
        self._updates = count
        for state in self.adamw.state.values():
            state["step"].fill_(count)

    def parts(self) -> list[Part]:
        """The moments to save in checkpoints. No two parts on one process contain rows of the same stored tensor."""
        return [{tensor: (0, values) for tensor, values in self.moments.items()}]

    def state_tensors(self) -> Iterator[Tensor]:
        """All tensors that persist between steps."""
        for moments in self.moments.values():
            yield from moments.values()
        for state in self.adamw.state.values():
            yield state["step"]


def build_optimizer(fused_params: Sequence[FusedParam], config: Config, mesh: Mesh) -> Optimizer:
    """Builds the optimizer that `config.optim` describes, with zero moments. Indices are not trained."""
    trained = [fused for fused in fused_params if not fused.slices[0].parameter.is_index]
    optimizer: Optimizer = pkgutil.resolve_name(config.optim.builder)(trained, config, mesh)
    return optimizer


def plain_adamw(fused_params: Sequence[FusedParam], config: Config, mesh: Mesh) -> Optimizer:
    """AdamW for every parameter. Needs no communication."""
    return Optimizer(build_adamw(fused_params, config.optim))
