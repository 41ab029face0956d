"""This process's slices of a checkpoint's tensors: weights and moments under mathematical names, and RNG states."""

from dataclasses import dataclass

import torch
from torch import Tensor

from boost.models.fused import FusedParam, ParamSlice, fused_params
from boost.optim.adamw import State
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


def local_slices(model: Model, mesh: Mesh, state: State) -> list[LocalSlice]:
    """This process's slices of weights, and of moments where `state` has them. Views, not copies."""
    found = []
    for fused in fused_params(model):
        for param_slice in fused.local_slices():
            name, shape = param_slice.parameter.name, param_slice.parameter.shape
            offsets = _offsets(fused, param_slice, mesh)
            weight = param_slice.view(fused.tensor.detach())
            found.append(LocalSlice(f"model.{name}", weight, shape, offsets))
            for moment, value in state.get(fused.tensor, {}).items():
                found.append(LocalSlice(f"optim.{moment}.{name}", param_slice.view(value), shape, offsets))
    return found


def named_slices(model: Model, mesh: Mesh, state: State) -> dict[str, Tensor]:
    """The same for torch.distributed.checkpoint, by name."""
    return {s.name: TensorSlice(s.local, s.shape, s.offsets) for s in local_slices(model, mesh, state)}


def random_states(mesh: Mesh) -> dict[str, Tensor]:
    """RNG states of this process by their names in a checkpoint."""
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
    """Offsets of a slice in its parameter: after the slices of lower TP ranks and the rows of other replicas."""
    offsets = [0] * len(param_slice.parameter.shape)
    if fused.placement.dim is not None:
        offsets[fused.placement.dim] = mesh.tp.rank * (param_slice.parameter.shape[fused.placement.dim] // mesh.tp.size)
    offsets[0] += param_slice.offset
    return tuple(offsets)
