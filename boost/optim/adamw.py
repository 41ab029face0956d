"""AdamW over stored parameters: torch's fused implementation, in weight-decay groups, with state that exists from the start."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from boost.config import Config
from boost.config.factors import is_factor
from boost.config.optimizers import OptimConfig
from boost.models.fused import FusedParam
from boost.parallel.mesh import Mesh
from boost.parallel.replicas import digest

MOMENTS = ("exp_avg", "exp_avg_sq")

State = dict[Tensor, dict[str, Tensor]]
"""Moments by name, each with the shape of its local shard."""

Part = dict[Tensor, tuple[int, dict[str, Tensor]]]
"""Moments of some rows of stored tensors, from the first of these rows on."""


def decays(fused: FusedParam, optim: OptimConfig) -> bool:
    """Whether a stored tensor has weight decay. Every parameter of a linear does; embedding, head and norms too if
    optim.decay_on = 'all'. For factors, Frobenius decay replaces it."""
    role = fused.slices[0].parameter.role
    if is_factor(role) and optim.frobenius_decay:
        return False
    return optim.decay_on == "all" or role.startswith(("enter.", "q.", "kv.", "o.", "leave."))


def build_adamw(fused_params: Sequence[FusedParam], optim: OptimConfig) -> torch.optim.AdamW:
    """torch's fused AdamW over the local shards of fused parameters."""
    decaying = [decays(fused, optim) for fused in fused_params]
    groups = [
        {
            "params": [s.tensor for s, each in zip(fused_params, decaying, strict=True) if each == which],
            "weight_decay": decay,
        }
        for which, decay in ((True, optim.weight_decay), (False, 0.0))
    ]
    optimizer = fused_adamw([group for group in groups if group["params"]], optim)
    for fused in fused_params:
        optimizer.state[fused.tensor] = fresh_state(fused.tensor, zeros(fused.tensor, MOMENTS))
    return optimizer


def fused_adamw(groups: Iterable[dict[str, object]], optim: OptimConfig) -> torch.optim.AdamW:
    """torch's fused AdamW for these groups, without state."""
    return torch.optim.AdamW(groups, lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, fused=True)


def zeros(param: Tensor, names: Iterable[str]) -> dict[str, Tensor]:
    """Moments of a tensor before the first step. torch creates them in the first step, too late for loading a checkpoint."""
    return {name: torch.zeros_like(param, memory_format=torch.preserve_format, requires_grad=False) for name in names}


def fresh_state(param: Tensor, moments: dict[str, Tensor]) -> dict[str, Tensor]:
    """torch's state of a parameter: step count and moments."""
    return {"step": torch.zeros((), dtype=torch.float32, device=param.device), **moments}


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = rate


class Optimizer:
    """The interface of an optimizer for training, checkpoints and memory measurement; by default AdamW."""

    name = "adamw"
    """optim.name."""

    def __init__(self, adamw: torch.optim.AdamW) -> None:
        self.adamw = adamw
        self.moments: State = {
            param: {name: value for name, value in state.items() if name != "step"}
            for param, state in adamw.state.items()
        }
        self._updates = 0

    def step(self, number: int, rate: float) -> None:
        """The update of training step `number` (0-based) at this learning rate."""
        set_learning_rate(self.adamw, rate)
        self.adamw.step()
        self._updates += 1

    @property
    def takes_tensors(self) -> bool:
        """Whether `launch` is all of a step: not where a subclass has a step of its own, which may read numbers on the host."""
        return type(self).step is Optimizer.step

    def launch(self, rate: float, divisor: Tensor, skip: Tensor) -> None:
        """The update with gradients over `divisor`, or none if `skip` is 1: fp32 scalars on the device of the parameters, which the
        host does not read. Gradients are divided in place. An update that turns out to have been skipped is to be
        taken back (`take_back`)."""
        set_learning_rate(self.adamw, rate)
        self.adamw.grad_scale, self.adamw.found_inf = divisor, skip  # type: ignore[attr-defined]
        try:
            self.adamw.step()
        finally:
            del self.adamw.grad_scale, self.adamw.found_inf  # type: ignore[attr-defined]
        self._updates += 1

    def take_back(self) -> None:
        """The latest `launch` was skipped: it does not count. The counts on the device, which it corrected itself, stay."""
        self._updates -= 1

    @property
    def updates(self) -> int:
        """Updates since moments were zero, for AdamW's bias correction (skipped steps do not count)."""
        return self._updates

    @updates.setter
    def updates(self, count: int) -> None:
        self._updates = count
        for state in self.adamw.state.values():
            state["step"].fill_(count)

    def parts(self) -> list[Part]:
        """What checkpoints have of moments. No two parts of one process have rows of the same stored tensor."""
        return [{tensor: (0, values) for tensor, values in self.moments.items()}]

    def state_tensors(self) -> Iterator[Tensor]:
        """All persistent state."""
        for moments in self.moments.values():
            yield from moments.values()
        for state in self.adamw.state.values():
            yield state["step"]

    # For replicas that come and go (`boost.train.recovery`).

    division: Any = None
    """What `parts` depends on, where that changes."""

    def facts(self) -> dict[str, Any]:
        """What a replica that comes in needs to know before `hand_over`, as JSON."""
        return {"updates": self.updates}

    def take_facts(self, facts: dict[str, Any]) -> None:
        """Inverse of `facts`."""
        self.updates = facts["updates"]

    def hand_over(self, mesh: Mesh, donor: int, takes: bool) -> None:
        """State from replica `donor` of the mesh to those that take it. It holds from `settle` on. Collective."""
        for tensor in self.state_tensors():
            dist.broadcast(tensor if takes else torch.empty_like(tensor), group=mesh.dp.group, group_src=donor)

    def digests(self, device: torch.device) -> list[Tensor]:
        """Of the state after `hand_over`: numbers that are the same on all replicas, or 0."""
        return [digest(self.state_tensors(), device)]

    def settle(self) -> None:
        """An exchange between replicas is complete on all processes."""

    def drop(self) -> None:
        """An exchange between replicas was interrupted before it was complete on any process."""

    def require_whole(self) -> None:
        """Raises TrainingError if no replica that is left holds some of the state."""


def plain_adamw(fused_params: Sequence[FusedParam], config: Config, mesh: Mesh) -> Optimizer:
    """AdamW for every parameter. Needs no communication."""
    return Optimizer(build_adamw(fused_params, config.optim))
