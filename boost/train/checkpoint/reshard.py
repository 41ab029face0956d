"""Slices of a checkpoint's tensors on any mesh: the rectangles of the weights and moments that this process holds and writes.

With any mesh and layout, tensors have the names and global shapes of the model's parameters, and each slice has its offsets
within a tensor. A save writes each slice once (`assign`). A load asks for the slices on its own mesh, and copies them from all
files that hold parts of them (load.py). RNG states are separate tensors for each process.

DTensor describes equal shards along dimensions. That is not always enough: equal shards of a fused tensor are unequal shards of its
parameters.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from boost.errors import DamagedCheckpointError
from boost.models.fused import fused_params
from boost.optim.adamw import Part
from boost.parallel.mesh import Mesh
from boost.train.model import Model

Key = tuple[str, tuple[int, ...]]
"""Name and offsets of a slice, the same on every process that holds it."""


@dataclass(frozen=True)
class LocalSlice:
    """The rectangle `local` of a tensor of `shape`, at `offsets`."""

    name: str
    local: Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]


def local_slices(model: Model, mesh: Mesh, parts: Iterable[Part] = ()) -> list[LocalSlice]:
    """This process's slices of the weights, and of the moments in `parts`. They are views, not copies."""
    slices, held = list[LocalSlice](), list(parts)
    for fused in fused_params(model):
        tensors = [("model", s.view(fused.tensor.detach()), s) for s in fused.local_slices()]
        for first, moments in (part[fused.tensor] for part in held if fused.tensor in part):
            for moment, value in moments.items():
                tensors += [(f"optim.{moment}", s.view(value), s) for s in fused.slices_of(first, value.shape[0])]
        for kind, local, param_slice in tensors:
            parameter, dim = param_slice.parameter, fused.placement.dim
            offsets = [0] * len(parameter.shape)
            if dim is not None:  # skips the shards of lower TP ranks
                offsets[dim] = mesh.tp.rank * (parameter.shape[dim] // mesh.tp.size)
            offsets[0] += param_slice.offset  # and the rows that other replicas hold
            slices.append(LocalSlice(f"{kind}.{parameter.name}", local, parameter.shape, tuple(offsets)))
    return slices


def random_states(mesh: Mesh) -> list[LocalSlice]:
    """This process's RNG states. They are copies."""
    states = {f"rng.cpu.{mesh.rank}": torch.get_rng_state()}
    if mesh.device.type == "cuda":
        states[f"rng.cuda.{mesh.rank}"] = torch.cuda.get_rng_state(mesh.device)
    return [LocalSlice(name, state, tuple(state.shape), (0,)) for name, state in states.items()]


def restore_random_states(states: Iterable[LocalSlice], path: Path) -> None:
    """Restores what `random_states` returned, as read from `path`. Raises DamagedCheckpointError."""
    for state in states:
        set_state = torch.set_rng_state if state.name.startswith("rng.cpu.") else torch.cuda.set_rng_state
        try:
            set_state(state.local)
        except RuntimeError as error:
            raise DamagedCheckpointError(f"'{path}' has a random state, {state.name}, that is none: {error}") from None


def assign(by_rank: list[dict[Key, int]]) -> list[set[Key]]:
    """Assigns each slice to the least loaded process that holds it, given the bytes of those that each process holds. Returns the
    slices that each process writes."""
    holders: dict[Key, list[int]] = {}
    for rank, held in enumerate(by_rank):
        for key in held:
            holders.setdefault(key, []).append(rank)
    load, assigned = [0] * len(by_rank), [set[Key]() for _ in by_rank]
    for key, ranks in sorted(holders.items(), key=lambda item: (-by_rank[item[1][0]][item[0]], item[0])):
        writer = min(ranks, key=lambda rank: (load[rank], rank))
        load[writer] += by_rank[writer][key]
        assigned[writer].add(key)
    return assigned
