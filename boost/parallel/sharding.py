"""Weights that data-parallel replicas share: torch's fully_shard over what one process holds of a layout.

ZeRO-1 (`parallel.shard = "optimizer"`) and FSDP (`"full"`) are the same division: each of the dp processes that hold the same
part of a stored tensor keeps some of its rows, with their moments, and updates them. They differ in how long the whole
part lives once gathered: for the optimizer step, or for one block's forward or backward pass.

Norms are not sharded: of a weight in ten thousand, and gathering them in bf16 would round what they scale by.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from boost.config.schema import ParallelConfig
from boost.errors import ConfigError
from boost.models.decoder import Decoder
from boost.models.stored import Shard, Stored, storages
from boost.parallel.mesh import Mesh


def shard(root: nn.Module, decoder: Decoder, parallel: ParallelConfig, mesh: Mesh) -> None:
    """Divides the weights of a decoder, or of a stage of one, among its replicas, in units of blocks.

    `root` is the module whose forward pass runs it: the decoder, or what a pipeline wraps it into. Gathers are in
    the dtype of activations, sums of gradients in that of weights. Raises ConfigError where torch is too old for
    parallel.shard_outer.
    """
    assert mesh.device_mesh is not None
    norms = {s.parameter for s in storages(decoder) if s.parameter.ndim == 1}
    partial = {s.parameter for s in storages(decoder) if s.cut.partial} - norms
    options: dict[str, Any] = {}
    if parallel.shard_outer and parallel.tp > 1:
        options["shard_placement_fn"] = _over_replicas(partial, mesh)
    else:
        partial = set()
    weights = next(decoder.parameters()).dtype
    if decoder.compute_dtype != weights:
        # Gathered weights are cast where they are used otherwise: half of the bytes, the same numbers.
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=decoder.compute_dtype, reduce_dtype=weights, cast_forward_inputs=False
        )
    ways = [(s.parameter, "replicas" if s.parameter in partial else "dp") for s in storages(decoder)]
    over = {id(parameter): way for parameter, way in ways}
    places = [(m, name, over[id(p)]) for m in decoder.modules() for name, p in m.named_parameters(recurse=False)]
    gathered_for_long = {"optimizer": False, "full": True}[parallel.shard]
    for unit in (*decoder.blocks, root):
        fully_shard(
            unit,
            mesh=mesh.device_mesh["dp"],
            reshard_after_forward=gathered_for_long and unit is not root,
            ignored_params=norms,
            **options,
        )
        assert isinstance(unit, FSDPModule)
        unit.set_gradient_divide_factor(1.0)  # sums, like those of replicas that share nothing
        if mesh.device.type == "cpu":
            unit.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled sum
    for module, name, way in places:
        _remember(module, name, way, mesh)


def last_backward(module: nn.Module, last: bool, parallel: ParallelConfig) -> None:
    """Says before a backward pass whether it is the last of its step. Does nothing for a module that is not sharded.

    ZeRO-1 sums gradients once, behind the last one, and lets go of the gathered weights then; FSDP does both each time.
    """
    if isinstance(module, FSDPModule):
        every_time = last or parallel.shard == "full"
        module.set_is_last_backward(last)
        module.set_requires_gradient_sync(every_time)
        module.set_reshard_after_backward(every_time)


def _over_replicas(partial: set[nn.Parameter], mesh: Mesh) -> Any:
    """What places some parameters on dp x tp and leaves the others where they are."""
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
    except ImportError:
        raise ConfigError(
            f"parallel.shard_outer = true needs a newer torch than {torch.__version__}, which shards all weights of a block "
            "over the same processes (2.13 has it); set it to false"
        ) from None
    assert mesh.replicas.group is not None
    everywhere = FSDPMeshInfo(DeviceMesh.from_group(mesh.replicas.group, mesh.device.type), shard_mesh_dim=0)
    return lambda parameter: ShardPlacementResult(None, everywhere) if parameter in partial else None


def _remember(module: nn.Module, name: str, over: str, mesh: Mesh) -> None:
    """Tells a module which rows of a parameter are kept here."""
    parameter = getattr(module, name)
    if not isinstance(parameter, DTensor):
        return
    assert isinstance(module, Stored)
    local = parameter.to_local().detach()
    size, rank = mesh.dp.size, mesh.dp.rank
    if over == "replicas":
        size, rank = size * mesh.tp.size, rank * mesh.tp.size + mesh.tp.rank
    rows = -(-parameter.shape[0] // size)  # as torch.chunk deals them out: the last processes may have fewer
    first = min(rank * rows, parameter.shape[0])
    assert local.shape[0] == min(rows, parameter.shape[0] - first)
    module.shards[name] = Shard(nn.Parameter(local), first, over)
