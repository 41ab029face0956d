"""Snapshots: the part of a checkpoint that one process writes, that is, its share of the slices, the state, and the tokenizer.

Replicas hold the same slices. Each slice is assigned to one writer so that all processes write about the same amount. The
assignment is made once. A snapshot refers either to the weights themselves (foreground save, done before the next step) or to
copies in a buffer (background save, while training continues). The buffer is reused, and pinned if the weights are on a GPU.
"""

import dataclasses
from typing import Any

import torch
import torch.distributed as dist

from boost.config import Config
from boost.optim.adamw import Optimizer
from boost.parallel.mesh import Mesh
from boost.train.checkpoint.slices import LocalSlice, local_slices, random_states
from boost.train.checkpoint.state import CheckpointState, Position
from boost.train.model import Model

Key = tuple[str, tuple[int, ...]]
"""Name and offsets of a slice: the same on every process that holds it."""


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """This process's part of a checkpoint of one step."""

    state: CheckpointState
    tokenizer: bytes
    slices: list[LocalSlice]
    """In file order: wider dtypes first, so that every tensor is aligned."""

    @property
    def step(self) -> int:
        """The step that was saved."""
        return self.state.step


class HostBuffer:
    """Host memory for one copy of this process's slices."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self._buffer.nbytes

    def reserve(self, slices: list[LocalSlice]) -> None:
        """Allocates and touches the memory, so that allocation and page faults do not slow down saves."""
        total = sum(each.local.nbytes for each in slices)
        if self.nbytes != total:
            pinned = any(each.local.is_cuda for each in slices)
            self._buffer = torch.zeros(total, dtype=torch.uint8, pin_memory=pinned)

    def copy(self, slices: list[LocalSlice]) -> list[LocalSlice]:
        """Returns the slices with their tensors replaced by copies. Waits for the copies to finish."""
        self.reserve(slices)
        copies, begin = [], 0
        for each in slices:
            end = begin + each.local.nbytes
            copy = self._buffer[begin:end].view(each.local.dtype).view(each.local.shape)
            copies.append(dataclasses.replace(each, local=copy.copy_(each.local, non_blocking=True)))
            begin = end
        if any(each.local.is_cuda for each in slices):
            torch.cuda.current_stream().synchronize()
        return copies


class SaveShare:
    """The slices that this process writes. Valid for all saves until the optimizer state is resharded. The constructor is
    collective."""

    def __init__(self, model: Model, optimizer: Optimizer, mesh: Mesh) -> None:
        self._model, self._optimizer, self._mesh = model, optimizer, mesh
        held = {(s.name, s.offsets): s.local.nbytes for s in local_slices(model, mesh, optimizer.parts())}
        by_rank = [held]
        if mesh.size > 1:
            by_rank = [held] * mesh.size
            dist.all_gather_object(by_rank, held, group=mesh.everyone.group)
        self._keys = _assign(by_rank)[mesh.rank]

    def slices(self) -> list[LocalSlice]:
        """Views of the current weights and moments, and this process's RNG states."""
        found = [
            each
            for each in local_slices(self._model, self._mesh, self._optimizer.parts())
            if (each.name, each.offsets) in self._keys
        ]
        for name, value in random_states(self._mesh).items():
            found.append(LocalSlice(name, value, tuple(value.shape), (0,)))
        return sorted(found, key=lambda each: (-each.local.element_size(), each.name, each.offsets))


def _assign(by_rank: list[dict[Key, int]]) -> list[set[Key]]:
    """Assigns each slice to the least loaded process that holds it. Returns the slices of each process."""
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


def take_snapshot(
    share: SaveShare,
    optimizer: Optimizer,
    position: Position,
    config: Config,
    tokenizer: bytes,
    data: dict[str, Any],
    mesh: Mesh,
    buffer: HostBuffer | None = None,
) -> Snapshot:
    """Takes this process's snapshot of the current step. Without a `buffer`, it refers to the weights themselves and must be
    written before they change."""
    state = CheckpointState(
        step=position.step,
        tokens=position.tokens,
        updates=optimizer.updates,
        next_sample=(position.step + position.skipped) * config.train.global_batch,
        skipped_steps=position.skipped,
        trouble=position.trouble,
        doubt=position.doubt,
        recent=position.recent,
        best_heldout_loss=position.best_heldout_loss,
        stale_evaluations=position.stale_evaluations,
        processes=mesh.size,
        data=data,
        config=config.model_dump(),
    )
    slices = share.slices()
    return Snapshot(state, tokenizer, buffer.copy(slices) if buffer else slices)
