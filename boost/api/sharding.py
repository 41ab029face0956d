"""`parallelize`: shards modules of `boost.nn` over TP ranks."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from boost.config.architecture import Parameter
from boost.config.families import ModelConfig
from boost.errors import ConfigError
from boost.models.fused import fused_params, local_slice
from boost.nn import Block, Decoder, LowRankAttention, LowRankMLP, Spec
from boost.nn.plain import stored_parameters
from boost.nn.weights import storage
from boost.text import JsonObject

KINDS = Decoder, Block, LowRankAttention, LowRankMLP
Shardable = Decoder | Block | LowRankAttention | LowRankMLP
Sharded = TypeVar("Sharded", bound=nn.Module)


def parallelize(
    model: Sharded, mesh: DeviceMesh | dist.ProcessGroup | None, *, layout: str | None = None, **options: object
) -> Sharded:
    """Shards a module over TP ranks. The result computes the same function with the same weights.

    Every process calls it with the same unsharded module, and gets a new module with its own shards; the original
    is unchanged. For data parallelism, use torch's DDP or FSDP2 (`fully_shard`) over another dimension of the mesh.

    Args:
        model: an unsharded `Decoder`, `Block`, `LowRankAttention` or `LowRankMLP` of `boost.nn`.
        mesh: the TP ranks, as in `boost.nn.Spec`.
        layout: name of a layout, such as btp or btp-sp (default: the family's usual layout).
        options: the layout's options (norm, grouping, overlap), and recompute.

    Frozen parameters stay frozen, and shared ones stay shared. Raises ConfigError if the layout cannot shard these sizes over the
    mesh, or shards shared parameters differently, or if the module has more than weights, such as hooks or adapters.
    """
    if not isinstance(model, KINDS):
        raise ConfigError(
            f"model is a {type(model).__name__}; only boost.nn's Decoder, Block, LowRankAttention and LowRankMLP can be sharded: "
            "build your model from them, or use boost.nn.functional"
        )
    spec = model.spec
    if spec.tp.size > 1:
        raise ConfigError(f"model is already sharded over {spec.tp.size} TP ranks; pass the unsharded module")
    first = next(model.parameters())
    given = {"layout": layout, "mesh": mesh, "device": first.device, "dtype": first.dtype, "recompute": spec.recompute}
    sizes = spec.model.model_copy(update={"tied": isinstance(model, Decoder) and model.is_tied})
    over = spec_of(sizes, {**given, "compute_dtype": spec.compute_dtype, "seed": spec.seed, **options})
    kind: Any = next(kind for kind in KINDS if isinstance(model, kind))
    layer = model.attn.layer if isinstance(model, Block) else getattr(model, "layer", None)
    sharded: Any = kind(over, initialized=False) if layer is None else kind(over, layer)
    whole = stored_parameters(model, sharded, is_copy=True)
    fill(sharded, lambda parameter: whole[parameter.name])
    restore(sharded, traits_of(whole))
    for path, module in sharded.named_modules():
        module.training = model.get_submodule(path).training
    return cast(Sharded, sharded)


def spec_of(model: ModelConfig, options: Mapping[str, Any]) -> Spec:
    """The `Spec` for a [model] section; `options` are the other arguments of `Spec`."""
    return Spec(**{**model.model_dump(exclude_none=True), **options})


@torch.no_grad()
def fill(module: Shardable, read: Callable[[Parameter], Tensor]) -> None:
    """Copies whole parameters into this process's shards of a `boost.nn` module, one at a time."""
    for fused in fused_params(module):
        (only,) = fused.slices
        storage(fused.parameter).copy_(local_slice(only.parameter, module.layout, read(only.parameter)))


Traits = JsonObject
"""What weights do not tell, by names in a checkpoint: "frozen" parameters, and "tied" ones, a list of names for each tensor."""


def traits_of(parameters: Mapping[str, nn.Parameter]) -> Traits:
    """The traits of parameters with these names."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in parameters.items():
        names.setdefault(parameter, []).append(name)
    frozen = [name for name, weight in parameters.items() if not weight.requires_grad and weight.is_floating_point()]
    return {"frozen": frozen, "tied": [tied for tied in names.values() if len(tied) > 1]}


def restore(module: Shardable, traits: Traits, tied: bool = True) -> None:
    """Freezes and, if `tied`, ties parameters of a new module. Raises ConfigError if its layout shards tied ones differently."""
    paths = {parameter: path for path, parameter in module.named_parameters()}
    fused = {each.slices[0].parameter.name: each for each in fused_params(module)}
    for name in traits.get("frozen", ()):
        fused[name].parameter.requires_grad_(False)
    for first, *others in traits.get("tied", ()) if tied else ():
        for name in others:
            path, _, weight = paths[fused[name].parameter].rpartition(".")
            if module.spec.tp.size > 1 and fused[name].placement != fused[first].placement:
                raise ConfigError(
                    f"{path}.{weight} is {paths[fused[first].parameter]}, but layout {module.spec.parallel.layout} shards them "
                    "differently over TP ranks; untie them first"
                )
            setattr(module.get_submodule(path), weight, fused[first].parameter)
