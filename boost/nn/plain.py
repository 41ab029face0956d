"""Plain modules, whose weights the fused kernels read without calling them, and calls of all others.

A module that tools or users changed (hooks, adapters, another class, a bias) is called, as in any PyTorch model. Over several TP
ranks, the norm, the projection and its collective are one operation, in which such a module has no place: `refuse` raises an error.

Legend: B sequences, S tokens per sequence, T = B * S.
"""

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as torch_module

from boost.config.architecture import IGNORED
from boost.errors import ConfigError
from boost.layouts.single.runtime import Single
from boost.models.group import Flow
from boost.models.interface import NOTHING_IN_FLIGHT, Teaching
from boost.models.kernels import statistic_dtype

TENSORS = (nn.Parameter, Tensor, DTensor)
"""Types of a plain module's weight. `functional_call` replaces parameters by tensors; quantizers, by other types."""

WITH_WEIGHT = (nn.Linear, nn.Embedding, nn.RMSNorm)

EMBEDDING: dict[str, Any] = {"padding_idx": None, "max_norm": None, "scale_grad_by_freq": False, "sparse": False}
"""Options of a plain `nn.Embedding`."""


def difference(module: nn.Module, kind: type[nn.Module], **options: Any) -> str | None:
    """What makes `module` other than a plain `kind` with these attributes; None if it is plain.

    This is the whole list. Other classes include parametrizations, FSDP2's and wrappers; hooks include pruning's.
    """
    if type(module) is not kind:
        return f"is a {type(module).__name__}"
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return "has hooks"
    if "forward" in module.__dict__ or module._compiled_call_impl is not None:
        return "has another forward"
    for name, value in options.items():
        if getattr(module, name) != value:
            return f"has {name} = {getattr(module, name)}"
    if kind in WITH_WEIGHT:
        weights = module._parameters
        if weights.get("bias") is not None:
            return "has a bias"
        if type(weights.get("weight")) not in TENSORS:
            return f"has a weight that is a {type(getattr(module, 'weight', None)).__name__}, not a parameter"
    return None


def has_global_hooks() -> bool:
    """Whether hooks are registered for all modules, as profilers do."""
    return bool(torch_module._has_any_global_hook())


def refuse(what: str, why: str) -> NoReturn:
    """Raises ConfigError for a change that cannot be honored."""
    raise ConfigError(f"{what}, which {why}")


def call(module: nn.Module, x: Tensor) -> Tensor:
    """Calls a module on tokens, or on activations, whose dtype its weights need not have."""
    narrow = x.dtype in (torch.bfloat16, torch.float16)
    with torch.autocast(x.device.type, x.dtype if narrow else None, enabled=narrow):
        y: Tensor = module(x)
    return y.to(x.dtype) if x.is_floating_point() else y


class OneProcess(Single):
    """`single`, in which a function may stand for the weight of the embedding, of the final norm and of the head."""

    def embed(self, flow: Flow, table: Tensor | Callable[[Tensor], Tensor], dtype: torch.dtype) -> Iterable[None]:
        if isinstance(table, Tensor):
            return super().embed(flow, table, dtype)
        flow.x = table(flow.x).to(dtype)
        return NOTHING_IN_FLIGHT

    def norm(self, x_TD: Tensor, gamma: Tensor | Callable[[Tensor], Tensor]) -> Tensor:
        return super().norm(x_TD, gamma) if isinstance(gamma, Tensor) else gamma(x_TD)

    def loss(
        self,
        normed_TD: Tensor,
        head: Tensor | Callable[[Tensor], Tensor],
        targets_T: Tensor,
        teaching: Teaching | None = None,
    ) -> Tensor:
        if isinstance(head, Tensor):
            return super().loss(normed_TD, head, targets_T, teaching)
        logits_TV = head(normed_TD).to(statistic_dtype(normed_TD.dtype))
        return F.cross_entropy(logits_TV, targets_T, ignore_index=IGNORED, reduction="sum")

    def all_logits(self, normed_TD: Tensor, head: Tensor | Callable[[Tensor], Tensor]) -> Tensor:
        return super().all_logits(normed_TD, head) if isinstance(head, Tensor) else head(normed_TD)

    def logits(self, x: Tensor, gamma: Tensor, head: Tensor, tokens_N: Tensor) -> Tensor:
        return self.all_logits(self.norm(x[tokens_N], gamma), head)
