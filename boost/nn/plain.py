"""Plain modules, whose weights the fused kernels read. Others are called, because what is attached to them needs a call. Over
several TP ranks, where a norm, its projections and a collective are one operation, they are refused (`is_read`). Where only weights
are stored or copied, whatever weights do not tell is refused (`stored_parameters`).
"""

from collections.abc import Callable, Iterable
from types import MethodType
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _has_any_global_hook

from boost.config.architecture import IGNORED
from boost.errors import ConfigError
from boost.layouts.single import Single
from boost.models.fused import fused_params
from boost.models.group import LinearGroup
from boost.models.interface import NOTHING_IN_FLIGHT, Flow, Teaching
from boost.models.kernels import STATISTIC_DTYPE

WITH_WEIGHT = (nn.Linear, nn.Embedding, nn.RMSNorm)
WEIGHTS = (nn.Parameter, Tensor, DTensor)
"""Types of a weight. `functional_call` replaces parameters with tensors; quantizers, with other types."""
Weight = Tensor | Callable[[Tensor], Tensor]
"""A weight, or a function that stands for it."""
EMBEDDING: dict[str, object] = {"padding_idx": None, "max_norm": None, "scale_grad_by_freq": False, "sparse": False}
"""Options of a plain `nn.Embedding`."""


def difference(
    module: nn.Module, kind: type, hooks: bool = True, biased: bool = False, **options: object
) -> str | None:
    """What makes `module` other than a plain `kind` with these attributes; None if it is plain. This is the whole list. `hooks`
    includes what leaves the function of weights as it is, and is not saved. `biased`: whether a plain one has a bias."""
    own = type(module)
    if not hooks and issubclass(own, FSDPModule):
        own = own.__bases__[-1]
    if own is not kind:  # including a subclass, parametrizations, adapters, wrappers, and FSDP2's units
        return f"is a {own.__module__}.{own.__name__}"
    forward, backward = module._forward_hooks or module._forward_pre_hooks, module._backward_hooks
    if hooks and (forward or backward or module._backward_pre_hooks or module._compiled_call_impl):
        return "has hooks or is compiled"  # torch.nn.utils.prune is a hook, too
    if "forward" in module.__dict__ and module.forward != MethodType(type(module).forward, module):
        return "has another forward"
    for name, value in options.items():
        if getattr(module, name) != value:
            return f"has {name} = {getattr(module, name)}"
    if kind in WITH_WEIGHT:
        weights = module._parameters
        if (weights.get("bias") is not None) != biased:
            return "has no bias" if biased else "has a bias"
        if type(weights.get("weight")) not in WEIGHTS:
            return f"has a weight of type {type(getattr(module, 'weight', None)).__name__}"
    return None


def attached(module: nn.Module) -> str | None:
    """What a new module with the same weights would lack, of this module and its own parameters; None: nothing. Submodules and
    buffers are not included."""
    if any(value for name, value in vars(module).items() if name.endswith("_hooks")) or module._compiled_call_impl:
        return "has hooks or is compiled"
    if "forward" in module.__dict__ and module.forward != MethodType(type(module).forward, module):
        return "has another forward"
    for weight in module._parameters.values():
        if weight is not None and (weight._backward_hooks or weight._post_accumulate_grad_hooks):
            return "has gradient hooks"
    return None


def is_read(what: str | None, tp: int) -> bool:
    """Whether the fused kernels read weights, given a difference of the modules that hold them. False: the modules are called.
    Raises ConfigError over several TP ranks."""
    if tp == 1:
        return what is None and not _has_any_global_hook()  # profilers hook all modules
    if what is not None:
        raise ConfigError(
            f"{what}: over several TP ranks, only the decoder, its blocks, attn and mlp are called; attach it there, or merge it"
        )
    return True


def call(module: nn.Module, x: Tensor, batch: int) -> Tensor:
    """Calls a module on tokens [T], or on activations [T, D], whose dtype its weights need not have, as [B, S, ...]."""
    narrow = x.dtype in (torch.bfloat16, torch.float16)
    with torch.autocast("cpu" if x.is_meta else x.device.type, x.dtype if narrow else None, enabled=narrow):
        y: Tensor = module(x.unflatten(0, (batch, -1))).flatten(0, 1)
    return y.to(x.dtype) if x.is_floating_point() else y


class OneProcess(Single):
    """`single`, in which a function may stand for the weight of the embedding, of a norm and of the head."""

    def embed(self, flow: Flow, table: Weight, dtype: torch.dtype) -> Iterable[None]:
        if isinstance(table, Tensor):
            return super().embed(flow, table, dtype)
        flow.x = table(flow.x).to(dtype)
        return NOTHING_IN_FLIGHT

    def norm(self, x_TD: Tensor, gamma: Weight) -> Tensor:
        return super().norm(x_TD, gamma) if isinstance(gamma, Tensor) else gamma(x_TD)

    def norm_and_down(self, x_TD: Tensor, gamma: Weight, group: LinearGroup) -> Tensor:
        return group.down(self.norm(x_TD, gamma))

    def loss(self, normed_TD: Tensor, head: Weight, targets_T: Tensor, teaching: Teaching | None = None) -> Tensor:
        if isinstance(head, Tensor):
            return super().loss(normed_TD, head, targets_T, teaching)
        logits_TV = head(normed_TD).to(STATISTIC_DTYPE[normed_TD.dtype])
        return F.cross_entropy(logits_TV, targets_T, ignore_index=IGNORED, reduction="sum")

    def all_logits(self, normed_TD: Tensor, head: Weight) -> Tensor:
        return super().all_logits(normed_TD, head) if isinstance(head, Tensor) else head(normed_TD)


def stored_parameters(module: nn.Module, twin: nn.Module, is_copy: bool) -> dict[str, nn.Parameter]:
    """The parameters of `module` by name in a checkpoint, in forward order. `twin`: a new module with the same spec.

    Raises ConfigError if they do not tell what `module` computes. `is_copy`: they are for another module in this process, which
    would also lack hooks and wrappers.
    """
    same = () if is_copy else ("_orig_mod", "_checkpoint_wrapped_module")  # of torch.compile and checkpoint_wrapper

    def clean(path: str) -> str:
        return ".".join(part for part in path.split(".") if part not in same)

    def check(path: str, what: str | None) -> None:
        if what:
            other = "boost.parallelize copies" if is_copy else "a checkpoint holds"
            raise ConfigError(f"{path or 'model'} {what}, but {other} only weights; merge or remove it first")

    theirs = dict(twin.named_modules())
    for path, own in module.named_modules(remove_duplicate=False):
        if own._modules.keys().isdisjoint(same):
            like = theirs.get(clean(path))
            biased = isinstance(like, nn.Linear) and like.bias is not None
            options = {
                name: getattr(like, name) for name in ("eps", "activation", "act", *EMBEDDING) if hasattr(like, name)
            }
            check(path, difference(own, type(like), hooks=is_copy, biased=biased, **options))
    weights, expected = (
        {
            clean(path): cast(nn.Parameter, weight)  # indices are buffers
            for named in (model.named_parameters, model.named_buffers)
            for path, weight in named("", True, False)
        }
        for model in (module, twin)
    )
    dtype = next(iter(weights.values())).dtype
    for path in weights.keys() ^ expected.keys():
        check(path, "is no weight of boost.nn")
    for path, weight in weights.items():
        check(path, None if weight.shape == expected[path].shape else f"has shape {tuple(weight.shape)}")
        wanted = dtype if expected[path].is_floating_point() else expected[path].dtype
        check(path, None if weight.dtype == wanted else f"is {weight.dtype}, not {wanted}")
        hooks = is_copy and (weight._backward_hooks or weight._post_accumulate_grad_hooks)
        check(path, "has gradient hooks" if hooks else None)
    paths = {parameter: path for path, parameter in expected.items()}
    return {fused.slices[0].parameter.name: weights[paths[fused.parameter]] for fused in fused_params(twin)}
