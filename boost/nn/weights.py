"""Module weights over several TP ranks: code that reads parameters sees DTensors, while the computation uses local shards.

`clip_grad_norm_`, optimizers, FSDP2 and DCP must know which shard of a weight a TP rank holds. With plain tensors, their results
would be silently wrong: each rank would clip by the norm of its own shards and save only those.
"""

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from boost.config.layouts.spec import SUM_BACKWARD
from boost.errors import ConfigError
from boost.models.fused import FusedModule
from boost.nn.spec import Spec
from boost.parallel import collectives
from boost.parallel.mesh import Axis


class _OwnGradient(torch.autograd.Function):
    """forward: w -> w; wgrad: dw, in separate memory. A gradient that is part of a larger one (a concatenated weight's) would be
    a DTensor with an offset, which `copy.deepcopy` refuses."""

    @staticmethod
    def forward(ctx: FunctionCtx, weight: Tensor) -> Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> Tensor:
        return gradient.clone() if torch.compiler.is_compiling() or gradient.storage_offset() else gradient


class GradientSums:
    """Sums the gradients of replicated weights over TP ranks if each rank computes a part, such as for norms and outer factors
    under btp-sp or the final norm under btp."""

    def __init__(self, axis: Axis) -> None:
        self._axis, self.is_deferred = axis, False

    def local_weight(self, weight: DTensor) -> Tensor:
        """The weight on this rank. Its gradient is summed over TP ranks in the backward pass, by an all-reduce at each use.

        The sum is attached to each use, not to the parameter: FSDP2, `load_state_dict(assign=True)` and `functional_call` replace
        parameters, and hooks on the old ones would not run.
        """
        if self.is_deferred:
            return weight.to_local(grad_placements=[Partial()])
        return collectives.run(SUM_BACKWARD, weight.to_local(grad_placements=[Replicate()]), self._axis)


def shard_weights(module: nn.Module, spec: Spec) -> GradientSums:
    """Turns a module's weights, each a shard, into DTensors over TP. Returns the `GradientSums` they use."""
    sums = GradientSums(spec.tp)
    if spec.tp_mesh is None:
        return sums
    for fused in [child for child in module.modules() if isinstance(child, FusedModule)]:
        for attribute, placement in fused.placements.items():
            path, _, name = attribute.rpartition(".")
            owner = fused.get_submodule(path)
            on_mesh = Replicate() if placement.dim is None else Shard(placement.dim)
            weight: Tensor = DTensor.from_local(getattr(owner, name).detach(), spec.tp_mesh, [on_mesh], run_check=False)
            setattr(owner, name, nn.Parameter(weight) if name in owner._parameters else weight)
            owner.__dict__.setdefault("gradient_sums", {})[name] = sums if placement.partial else None
    return sums


def local_weight(module: nn.Module, name: str = "weight") -> Tensor:
    """The weight that the computation uses: this TP rank's shard, differentiable with respect to the parameter.

    Raises ConfigError if the parameter is no longer the DTensor that `shard_weights` created.
    """
    weight: Tensor = getattr(module, name)
    if "gradient_sums" not in module.__dict__:
        return weight
    if not isinstance(weight, DTensor) or name not in module._parameters:
        raise ConfigError(
            f"{name} of a {type(module).__name__} is not a DTensor parameter; with tensor parallelism, use fully_shard(model, "
            "mesh=mesh['dp']) for data parallelism (DistributedDataParallel rejects DTensors), and pass DTensors to "
            "functional_call"
        )
    sums: GradientSums | None = module.__dict__["gradient_sums"][name]
    return sums.local_weight(weight) if sums else own_shard(weight)


def own_shard(weight: Tensor) -> Tensor:
    """This rank's differentiable shard of a weight whose gradient is complete on each rank. Returns a plain tensor unchanged."""
    if not isinstance(weight, DTensor):
        return weight
    shard: Tensor = _OwnGradient.apply(weight.to_local(grad_placements=weight.placements))
    return shard


def whole_weight(weight: Tensor) -> Tensor:
    """A parameter, or its gradient, unsharded. Collective for DTensors: all ranks of their mesh must call it."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def storage(weight: Tensor) -> Tensor:
    """This rank's writable shard of a parameter, outside the graph."""
    weight = weight.detach()
    return weight.to_local() if isinstance(weight, DTensor) else weight


def once_differentiable(y: Tensor) -> Tensor:
    """Marks a result whose gradients have no gradients: asking for them raises ConfigError, instead of computing wrong ones."""

    def refuse(_: Tensor) -> None:
        if torch.is_grad_enabled():
            raise ConfigError("create_graph = True: boost.nn has no second derivatives; use create_graph = False")

    if y.requires_grad and not torch.compiler.is_compiling():
        y.register_hook(refuse)
    return y
