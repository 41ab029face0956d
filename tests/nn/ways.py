"""What users and tools attach to a PyTorch module: every way is a function that changes a model, plain or `boost.nn`'s, alike.

A way returns the model to train (itself, or a wrapper). Its effects are large, so that nothing can be dropped unnoticed.
"""

import copy
import io
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import create_selective_checkpoint_contexts

Way = Callable[[Any], Any]

Q, OUT, UP = "layers.1.attn.q_proj", "layers.0.attn.o_proj", "layers.1.mlp.up_proj"


def first(made: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Changes the residual stream in what a module takes or returns; latents may follow it."""
    return (change(made[0]), *made[1:]) if isinstance(made, tuple) else change(made)


def bent(x: Tensor) -> Tensor:
    """Another function of each element, which no norm undoes."""
    return x + 0.5 * x.abs()


# Hooks that change what passes through a module.


def forward_hook(path: str, model: Any) -> Any:
    model.get_submodule(path).register_forward_hook(lambda _m, _x, y: first(y, bent))
    return model


def pre_hook(path: str, model: Any) -> Any:
    def change(_module: nn.Module, x: Any) -> Any:
        return first(x, lambda t: bent(t) if t.is_floating_point() else (t + 1) % 64)

    model.get_submodule(path).register_forward_pre_hook(change)
    return model


def backward_hook(path: str, model: Any) -> Any:
    model.get_submodule(path).register_full_backward_hook(
        lambda _m, dx, _dy: tuple(d if d is None else 1.25 * d for d in dx)
    )
    return model


def backward_pre_hook(path: str, model: Any) -> Any:
    model.get_submodule(path).register_full_backward_pre_hook(lambda _m, dy: tuple(1.25 * d for d in dy))
    return model


# Other modules, and what they have in addition.


def put(path: str, make: Callable[[Any], nn.Module], model: Any) -> Any:
    """Puts `make(module)` in a module's place."""
    parent, _, name = path.rpartition(".")
    torch.manual_seed(0)
    setattr(model.get_submodule(parent), name, make(model.get_submodule(path)))
    return model


def linear(bias: bool, module: nn.Linear) -> nn.Module:
    return nn.Linear(module.in_features, module.out_features, bias=bias).double()


class Doubled(nn.Linear):
    """A subclass with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def subclassed(module: Any) -> nn.Module:
    return Doubled(module.in_features, module.out_features, bias=False).double()


def own_forward(path: str, model: Any) -> Any:
    module = model.get_submodule(path)
    usual = module.forward
    module.forward = lambda *x, **options: first(usual(*x, **options), bent)
    return model


def doubled_class(path: str, model: Any) -> Any:
    """Gives a module a subclass of its class, whose forward is another one."""
    module = model.get_submodule(path)
    kind: Any = type(module)

    class Twice(kind):  # type: ignore[misc]
        def forward(self, *x: Any, **options: Any) -> Any:
            return first(super().forward(*x, **options), bent)

    module.__class__ = Twice
    return model


class Wrapped(nn.Module):
    """A wrapper without the attributes of what it holds."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *x: Any, **options: Any) -> Any:
        return first(self.module(*x, **options), bent)


class Scaled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def parametrized(path: str, model: Any) -> Any:
    parametrize.register_parametrization(model.get_submodule(path), "weight", Scaled())
    return model


def of_utils(function: Callable[..., Any], path: str, model: Any) -> Any:
    torch.manual_seed(0)
    with warnings.catch_warnings(action="ignore"):
        function(model.get_submodule(path))
    return model


def activation(path: str, model: Any) -> Any:
    model.get_submodule(path).activation = "none"
    return model


def lora(targets: list[str], options: dict[str, Any], model: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False, **options)
    with warnings.catch_warnings(action="ignore"):
        return peft.inject_adapter_in_model(config, model)


# Parameters.


def freeze(model: Any) -> Any:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" not in name and ".A" not in name and "k_proj" not in name)
    return model


def tie(model: Any) -> Any:
    model.lm_head.weight = model.embedding.weight
    return model


def share(path: str, model: Any) -> Any:
    """Uses a module of the first block in the second one, too."""
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(f"layers.1{parent}"), name, model.get_submodule(f"layers.0{parent}.{name}"))
    return model


def gradient_hook(model: Any) -> Any:
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 1.5)
    return model


# Copies, states, and wrappers.


def pickled(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def emptied(model: Any) -> Any:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.to_empty(device="cpu").load_state_dict(state)
    return model


def converted(model: Any) -> Any:
    """Through fp32 and back: what is lost by rounding is lost alike."""
    return model.float().double()


def through_dcp(model: Any) -> Any:
    state = {name: 1.25 * value for name, value in get_model_state_dict(model).items()}
    set_model_state_dict(model, state)
    return model


def averaged(model: Any) -> Any:
    made = torch.optim.swa_utils.AveragedModel(model)
    made.update_parameters(model)
    return made


class Functional(nn.Module):
    """Calls a model through `functional_call`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *arguments: Any, **options: Any) -> Any:
        state = {name: p * 1.25 for name, p in self.model.named_parameters()}
        return torch.func.functional_call(self.model, state, arguments, options)


def selective(module: Any) -> Any:
    """Recomputes a module, but for its matrix products."""
    saved = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    return checkpoint_wrapper(module, context_fn=saved)


def compiled(model: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, backend="aot_eager")


FACTORS = (f"{Q}.A", f"{Q}.B", f"{OUT}.A", f"{UP}.B")
LINEARS = (Q, OUT, UP)
STREAMS = ("layers.1", "layers.0", "layers.1.attn", "layers.0.mlp")
HEADS = ("layers.1.attn.q_norm", "layers.0.attn.k_norm")
ENDS = ("embedding", "layers.1.attn.norm", "norm", "lm_head")
HOOKS = {"forward": forward_hook, "pre": pre_hook, "backward": backward_hook, "backward pre": backward_pre_hook}


def hooks(paths: tuple[str, ...]) -> dict[str, Way]:
    made: dict[str, Way] = {f"{kind} {path}": partial(hook, path) for kind, hook in HOOKS.items() for path in paths}
    made.pop("backward embedding", None)  # no gradient reaches tokens
    return made


def changes(paths: tuple[str, ...]) -> dict[str, Way]:
    """Changes of linears."""
    made: dict[str, Way] = {}
    for path in paths:
        made |= {
            f"bias {path}": partial(put, path, partial(linear, True)),
            f"subclass {path}": partial(put, path, subclassed),
            f"parametrize {path}": partial(parametrized, path),
            f"prune {path}": partial(of_utils, partial(prune.random_unstructured, name="weight", amount=0.5), path),
            f"weight norm {path}": partial(of_utils, parametrizations.weight_norm, path),
            f"old weight norm {path}": partial(of_utils, torch.nn.utils.weight_norm, path),
            f"spectral norm {path}": partial(of_utils, parametrizations.spectral_norm, path),
            f"old spectral norm {path}": partial(of_utils, torch.nn.utils.spectral_norm, path),
            f"own forward {path}": partial(own_forward, path),
            f"checkpoint_wrapper {path}": partial(put, path, checkpoint_wrapper),
        }
    return made


MODEL: dict[str, Way] = {
    "as it is": lambda model: model,
    "freeze": freeze,
    "gradient hooks": gradient_hook,
    "deepcopy": copy.deepcopy,
    "to_empty": emptied,
    "float, double": converted,
    "DCP state": through_dcp,
    "AveragedModel": averaged,
    "functional_call": Functional,
    "selective checkpoint": partial(put, "layers.1", selective),
    "selective checkpoint model": selective,
    "pickle": pickled,
    "checkpoint_wrapper model": checkpoint_wrapper,
    "new linear": partial(put, f"{UP}", lambda module: copy.deepcopy(module)),
}
"""Ways for a whole model."""

REENTRANT = partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT)
WRAPPERS: dict[str, Way] = {
    **{f"checkpoint_wrapper {path}": partial(put, path, checkpoint_wrapper) for path in STREAMS},
    **{f"wrapper {path}": partial(put, path, Wrapped) for path in STREAMS},
    **{f"reentrant {path}": partial(put, path, REENTRANT) for path in STREAMS},
    **{f"own forward {path}": partial(own_forward, path) for path in STREAMS},
    **{f"subclass {path}": partial(doubled_class, path) for path in STREAMS},
}
"""Ways for what takes and returns the residual stream."""

REPLACED: dict[str, Way] = {
    "tie": tie,
    "share q_proj": partial(share, ".attn.q_proj"),
    "share attn": partial(share, ".attn"),
    "bias lm_head": partial(put, "lm_head", partial(linear, True)),
    "LayerNorm": partial(put, "layers.1.mlp.norm", lambda _: nn.LayerNorm(32).double()),
    "final LayerNorm": partial(put, "norm", lambda _: nn.LayerNorm(32).double()),
    "RMSNorm with another eps": partial(put, "norm", lambda _: nn.RMSNorm(32, eps=0.1).double()),
    **{f"wrapper {path}": partial(put, path, Wrapped) for path in ENDS},
    "max_norm": partial(put, "embedding", lambda _: nn.Embedding(64, 32, max_norm=0.5).double()),
    "padding_idx": partial(put, "embedding", lambda _: nn.Embedding(64, 32, padding_idx=3).double()),
    "LoRA on lm_head, embedding": partial(lora, ["lm_head", "embedding"], {}),
}


def ways(family: str) -> dict[str, Way]:
    """Every way for a model of this family; for one with biases and norms of heads, those that concern them."""
    if family.endswith("-heads"):
        factors = (Q, OUT) if family.startswith("dense") else (f"{Q}.B", f"{OUT}.B")
        made = {"as it is": MODEL["as it is"], **hooks((*HEADS, Q, OUT, *factors))}
        made |= {f"LayerNorm {path}": partial(put, path, lambda _: nn.LayerNorm(4).double()) for path in HEADS}
        made |= {f"no bias {path}": partial(put, path, partial(linear, False)) for path in factors}
        return {**made, **{f"LoRA on {path}": partial(lora, [path.partition("attn.")[2]], {}) for path in factors}}
    made = {**MODEL, **WRAPPERS, **REPLACED, **hooks((*STREAMS, *ENDS))}
    if family == "dense":
        linears = ["q_proj", "o_proj", "up_proj"]
        adapters = {"LoRA": partial(lora, linears, {}), "DoRA": partial(lora, linears, {"use_dora": True})}
        return {**made, **hooks(LINEARS), **changes(LINEARS), **adapters}
    made |= {"LoRA": partial(lora, ["A", "B"], {}), "DoRA": partial(lora, ["A", "B"], {"use_dora": True})}
    made |= {**hooks((*FACTORS, *LINEARS)), **changes(FACTORS)}
    made |= {f"own forward {path}": partial(own_forward, path) for path in LINEARS}
    made |= {f"subclass {path}": partial(doubled_class, path) for path in LINEARS}
    made |= {f"activation {path}": partial(activation, path) for path in LINEARS}
    if family == "lax":
        del made["share attn"]  # the first block has no gates
        gate = ("layers.1.attn.qkv_mixer",)
        made |= {**hooks(gate), "own forward gate": partial(own_forward, *gate)}
    return made
