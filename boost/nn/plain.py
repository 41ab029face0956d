"""Plain modules, whose weights the fused kernels read without calling them, and everything else, which is called.

What users and tools attach to a module (hooks, adapters, another class, a bias) works only if the module is called. Over several TP
ranks, a norm, its projections and their collective are one operation, so it is refused there (`is_read`). A checkpoint has only
weights, so whatever they do not tell is refused when they are saved (`require_stored`).

Legend: B sequences, S tokens per sequence, T = B * S.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _has_any_global_hook

from boost.config.architecture import IGNORED
from boost.errors import ConfigError
from boost.layouts.single.runtime import Single
from boost.models.group import Flow
from boost.models.interface import NOTHING_IN_FLIGHT, Teaching
from boost.models.kernels import statistic_dtype

WITH_WEIGHT = (nn.Linear, nn.Embedding, nn.RMSNorm)
WEIGHTS = (nn.Parameter, Tensor, DTensor)
"""Types of a weight. `functional_call` replaces parameters with tensors; quantizers, with other types."""
EMBEDDING: dict[str, Any] = {"padding_idx": None, "max_norm": None, "scale_grad_by_freq": False, "sparse": False}
"""Options of a plain `nn.Embedding`."""


def difference(module: nn.Module, kind: type[nn.Module], **options: Any) -> str | None:
    """What makes `module` other than a plain `kind` with these attributes; None if it is plain. This is the whole list."""
    if type(module) is not kind:  # including a subclass, parametrizations, adapters, wrappers, and FSDP2's units
        return f"is a {type(module).__module__}.{type(module).__name__}"
    if has_hooks(module):  # including torch.nn.utils.prune
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
        if type(weights.get("weight")) not in WEIGHTS:
            return f"has a weight of type {type(getattr(module, 'weight', None)).__name__}"
    return None


def has_hooks(module: nn.Module) -> bool:
    """Whether something runs before or after a call of this module."""
    forward, backward = module._forward_hooks or module._forward_pre_hooks, module._backward_hooks
    return bool(forward or backward or module._backward_pre_hooks)


def is_read(what: str | None, tp: int) -> bool:
    """Whether the fused kernels read weights, given a difference of the modules that hold them. False: the modules are called.
    Raises ConfigError over several TP ranks."""
    if tp == 1:
        return what is None and not _has_any_global_hook()  # profilers hook all modules
    if what is not None:
        raise ConfigError(
            f"{what}: over several TP ranks, only the decoder, its blocks, attn and mlp are called; attach hooks there, and merge "
            "adapters before boost.parallelize"
        )
    return True


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

    def loss(self, normed_TD: Tensor, head: Any, targets_T: Tensor, teaching: Teaching | None = None) -> Tensor:
        if isinstance(head, Tensor):
            return super().loss(normed_TD, head, targets_T, teaching)
        logits_TV = head(normed_TD).to(statistic_dtype(normed_TD.dtype))
        return F.cross_entropy(logits_TV, targets_T, ignore_index=IGNORED, reduction="sum")

    def all_logits(self, normed_TD: Tensor, head: Tensor | Callable[[Tensor], Tensor]) -> Tensor:
        return super().all_logits(normed_TD, head) if isinstance(head, Tensor) else head(normed_TD)

    def logits(self, x: Tensor, gamma: Tensor, head: Tensor, tokens_N: Tensor) -> Tensor:
        return self.all_logits(self.norm(x[tokens_N], gamma), head)


def require_stored(module: nn.Module, twin: nn.Module, is_copy: bool) -> None:
    """Raises ConfigError if `module` has more than the weights of `twin`, a new module with the same spec. `is_copy`: the weights
    are for another module in this process, which would lack hooks and wrappers."""
    same = (
        () if is_copy else ("_orig_mod", "_checkpoint_wrapped_module")
    )  # torch.compile and recomputation: the same function

    def clean(path: str) -> str:
        return ".".join(part for part in path.split(".") if part not in same)

    def check(is_same: bool, path: str, what: str) -> None:
        if not is_same:
            other = "boost.parallelize copies" if is_copy else "checkpoints hold"
            raise ConfigError(f"{path or 'model'} {what}, but {other} only weights; merge or remove it first")

    theirs = dict(twin.named_modules())
    for path, own in module.named_modules(remove_duplicate=False):
        if not own._modules.keys().isdisjoint(same):
            continue
        kind = type(own).__bases__[-1] if isinstance(own, FSDPModule) else type(own)
        like = theirs.get(clean(path))
        check(kind is type(like), path, f"is a {kind.__module__}.{kind.__name__}")
        check("forward" not in own.__dict__, path, "has another forward")
        check(not (is_copy and (has_hooks(own) or own._compiled_call_impl)), path, "has hooks or is compiled")
        for name in ("eps", "activation", *EMBEDDING):
            value = getattr(own, name, None)
            check(value == getattr(like, name, None), path, f"has {name} = {value}")
    weights, dtype = {clean(path): weight for path, weight in module.named_parameters(remove_duplicate=False)}, None
    for path, weight in twin.named_parameters():
        own_weight = weights.pop(path, None)
        check(own_weight is not None and own_weight.shape == weight.shape, path, "is missing, or has another shape")
        assert own_weight is not None
        dtype = dtype or own_weight.dtype
        check(own_weight.dtype == dtype, path, f"is in {own_weight.dtype}, not in {dtype}")
        check(type(own_weight) in WEIGHTS, path, f"is of type {type(own_weight).__name__}")
        hooks = is_copy and (own_weight._backward_hooks or own_weight._post_accumulate_grad_hooks)
        check(not hooks, path, "has gradient hooks")
    for path in (*weights, *(name for name, _ in module.named_buffers())):
        check(False, path, "is no weight of boost.nn")
