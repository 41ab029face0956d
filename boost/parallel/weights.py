"""Tensors that replace a module's weights during passes: working copies in the dtype of the activations, or weights
gathered from the shards of data-parallel replicas.

Sharding applies torch's fully_shard to the layout's local tensors. ZeRO-1 (`parallel.shard = "optimizer"`) and FSDP (`"full"`)
shard the same way: each of the dp processes that hold the same local tensor keeps and updates some of its rows and their moments.
They differ in the lifetime of the gathered tensor: an optimizer step for ZeRO-1, one block's forward or backward pass for FSDP.

Norms are not sharded, because they account for only one in ten thousand weights, and gathering in bf16 would round the gains.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import DTensor

from boost.config import Config
from boost.config.layouts import spec_of
from boost.config.schema import ParallelConfig
from boost.config.storage import shard_axis
from boost.models.decoder import Decoder
from boost.models.fused import FusedModule, ParamShard, fused_params
from boost.parallel.mesh import Mesh


def shard(
    root: nn.Module, decoder: Decoder, parallel: ParallelConfig, mesh: Mesh, dtype: torch.dtype | None = None
) -> None:
    """Shards the weights of a decoder, or of one stage, over its replicas, one unit per block.

    `root`: the module whose forward pass runs the decoder or stage: either the decoder or its pipeline wrapper.
    All-gathers use the activations' dtype, and gradient sums use `dtype` (None: the weights' dtype).
    """
    params = list(fused_params(decoder))
    over = {s.parameter: shard_axis(s.placement.partial, s.parameter.ndim == 1, parallel) for s in params}
    norms, outer = ({p for p, axis in over.items() if axis == name} for name in ("", "replicas"))
    owners = {p: (m, name) for m in decoder.modules() for name, p in m.named_parameters(recurse=False)}
    options: dict[str, Any] = {}
    if outer:  # shard these over dp x tp, the other parameters over the default mesh
        assert mesh.replicas.group is not None
        replicas = DeviceMesh.from_group(mesh.replicas.group, mesh.device.type)
        everywhere = _fsdp_common.ShardPlacementResult(None, _fsdp_common.FSDPMeshInfo(mesh=replicas, shard_mesh_dim=0))
        options["shard_placement_fn"] = lambda parameter: everywhere if parameter in outer else None
    weights = next(decoder.parameters()).dtype
    if decoder.compute_dtype != weights or dtype not in (None, weights):
        # Sends half the bytes: weights are cast before the all-gather instead of at each use.
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=decoder.compute_dtype, reduce_dtype=dtype or weights, cast_forward_inputs=False
        )
    for unit in (*decoder.blocks, root):
        fully_shard(
            unit,
            mesh=mesh.weights_mesh,
            reshard_after_forward=parallel.shard == "full" and unit is not root,
            ignored_params=norms,
            **options,
        )
        assert isinstance(unit, FSDPModule)
        unit.set_gradient_divide_factor(1.0)  # sums gradients, as for unsharded replicas
        # A plain sum on every backend. gloo has no scaled sum. For bf16, NCCL reads PREMUL_SUM's scale from only two of the four
        # bytes in which torch stores it, which gives a factor of 0.
        unit.set_force_sum_reduction_for_comms(True)
    register_fsdp_forward_method(root, "next_logits")
    for parameter, (module, name) in owners.items():
        if parameter in norms:
            continue
        # Record which rows this process owns.
        size, rank = mesh.dp_cp.size, mesh.dp_cp.rank
        if parameter in outer:
            size, rank = size * mesh.tp.size, rank * mesh.tp.size + mesh.tp.rank
        sharded = getattr(module, name)
        assert isinstance(sharded, DTensor) and isinstance(module, FusedModule)
        rows = -(-sharded.shape[0] // size)  # split as torch.chunk does: the last processes may have fewer rows
        first, local = min(rank * rows, sharded.shape[0]), sharded.to_local().detach()
        assert local.shape[0] == min(rows, sharded.shape[0] - first)
        module.shards[name] = ParamShard(nn.Parameter(local), first, over[parameter])


def last_backward(module: nn.Module, last: bool, parallel: ParallelConfig) -> None:
    """Declares, before a backward pass, whether it is the last one of its step. A no-op for modules that are not sharded.

    ZeRO-1 reduces gradients and reshards the gathered weights once, after the last backward pass; FSDP does both in every pass.
    """
    if isinstance(module, FSDPModule):
        every_time = last or parallel.shard == "full"
        module.set_is_last_backward(last)
        module.set_requires_gradient_sync(every_time)
        module.set_reshard_after_backward(every_time)


def forget_gathered(module: nn.Module) -> None:
    """Reshards weights that forward passes without a backward pass (such as an evaluation) left gathered.

    Call this on every process after weights have changed. Otherwise, the next forward pass would use the old weights.
    """
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()


class WorkingCopies:
    """Casts weights once per step, and accumulates the copies' gradients into those of the weights:

        reducer.begin(micro_batches)
        with copies.in_use():
            for each micro-batch:
                loss.backward()
        reducer.finish()

    Copies are leaves, so autograd accumulates the gradients from all uses in one pass in the dtype of the activations.
    Gradients from different micro-batches are accumulated in the dtype of the weights.
    """

    def __init__(self, model: nn.Module, config: Config, accumulated: Callable[[nn.Parameter], None]) -> None:
        """Selects the parameters in a model, or in its pipeline stages, that get a copy under `config`.

        `accumulated` is called when a pass's gradient has been added to the parameter's gradient, because autograd does not
        call the parameter's own hooks.
        """
        self._dtype, self._accumulated = getattr(torch, config.train.compute_dtype), accumulated
        self._places = [
            (module, name)
            for module in (model.modules() if config.has_working_copies else ())
            if isinstance(module, FusedModule)
            for name, slices in module.slices.items()
            if spec_of(config.parallel).may_have_copy(slices[0].parameter.role)
        ]

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Context manager: modules hold copies of the current weights, for forward and backward passes including recomputation."""
        weights = [module.get_parameter(name) for module, name in self._places]
        copies = [nn.Parameter(torch.empty_like(w, dtype=self._dtype), w.requires_grad) for w in weights]
        if copies:
            with torch.no_grad():
                torch._foreach_copy_(list[Tensor](copies), list[Tensor](weights))
        for weight, copy in zip(weights, copies, strict=True):
            if weight.requires_grad:
                copy.register_post_accumulate_grad_hook(functools.partial(self._add_gradient, weight))
        try:
            self._put(copies)
            yield
        finally:
            self._put(weights)

    def _put(self, parameters: list[nn.Parameter]) -> None:
        for (module, name), parameter in zip(self._places, parameters, strict=True):
            setattr(module, name, parameter)

    @torch.no_grad()
    def _add_gradient(self, weight: nn.Parameter, copy: Tensor) -> None:
        assert copy.grad is not None
        if weight.grad is None:
            weight.grad = copy.grad.to(weight.dtype)
        else:
            weight.grad.add_(copy.grad)  # mixed dtypes, in one kernel
        copy.grad = None
        self._accumulated(weight)
