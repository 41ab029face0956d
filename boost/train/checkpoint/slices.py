"""This process's slices of a checkpoint's tensors: weights and moments by parameter name, and RNG states."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from boost.models.fused import FusedParam, ParamSlice, fused_params
from boost.optim.adamw import Part
from boost.parallel.mesh import Mesh
from boost.train.model import Model
from boost.train.tensor_slice import TensorSlice


@dataclass(frozen=True)
class LocalSlice:
    """The rectangle `local` of a tensor of `shape`, at `offsets`."""

    name: str
    local: Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]


def local_slices(model: Model, mesh: Mesh, parts: Iterable[Part] = ()) -> list[LocalSlice]:
    """This process's slices of weights, and of moments in `parts`. Views, not copies."""
    found, held = [], list(parts)
    for fused in fused_params(model):
        for param_slice in fused.local_slices():
            weight = param_slice.view(fused.tensor.detach())
            found.append(_local_slice("model", weight, fused, param_slice, mesh))
        for first, moments in (part[fused.tensor] for part in held if fused.tensor in part):
            for moment, value in moments.items():
                for param_slice in fused.slices_of(first, value.shape[0]):
                    view = param_slice.view(value)
                    found.append(_local_slice(f"optim.{moment}", view, fused, param_slice, mesh))
    return found


def _local_slice(kind: str, local: Tensor, fused: FusedParam, param_slice: ParamSlice, mesh: Mesh) -> LocalSlice:
    parameter = param_slice.parameter
    return LocalSlice(f"{kind}.{parameter.name}", local, parameter.shape, _offsets(fused, param_slice, mesh))


def named_slices(model: Model, mesh: Mesh, parts: Iterable[Part] = ()) -> dict[str, Tensor]:
    """`local_slices` as a state dict for torch.distributed.checkpoint. At most one part, because names must be unique."""
    return {s.name: TensorSlice(s.local, s.shape, s.offsets) for s in local_slices(model, mesh, parts)}


def random_states(mesh: Mesh) -> dict[str, Tensor]:
    """RNG states of this process, by their names in a checkpoint."""
    states = {f"rng.cpu.{mesh.rank}": torch.get_rng_state()}
    if mesh.device.type == "cuda":
        states[f"rng.cuda.{mesh.rank}"] = torch.cuda.get_rng_state(mesh.device)
    return states


def restore_random_states(states: dict[str, Tensor]) -> None:
    """Restores what `random_states` returned."""
    for key, value in states.items():
        if key.startswith("rng.cpu."):
            torch.set_rng_state(value)
        else:
            torch.cuda.set_rng_state(value)


def _offsets(fused: FusedParam, param_slice: ParamSlice, mesh: Mesh) -> tuple[int, ...]:
    """Offsets of a slice in its parameter: they skip the shards of lower TP ranks and the rows held by other replicas."""
    offsets = [0] * len(param_slice.parameter.shape)
    if fused.placement.dim is not None:
        offsets[fused.placement.dim] = mesh.tp.rank * (param_slice.parameter.shape[fused.placement.dim] // mesh.tp.size)
    offsets[0] += param_slice.offset
    return tuple(offsets)
