"""Verifies and loads checkpoints."""

import contextlib
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.filesystem import FileSystem

from boost.config.architecture import parameters
from boost.config.schema import ModelConfig
from boost.errors import CheckpointError, DamagedCheckpointError
from boost.optim.adamw import Optimizer
from boost.parallel.mesh import Mesh
from boost.train.checkpoint.agreement import run_on_all
from boost.train.checkpoint.folders import TENSORS
from boost.train.checkpoint.manifest import Manifest, read_manifest, verify_file
from boost.train.checkpoint.slices import named_slices, random_states, restore_random_states
from boost.train.checkpoint.state import Checkpoint, Position
from boost.train.checkpoint.structure import Shards, read_structure
from boost.train.model import Model

log = logging.getLogger("boost")

INIT_ONLY_FIELDS = ("factor_init", "init_std")
"""Fields of [model] that only affect the initial weights."""


class ShardReader(HuggingFaceStorageReader):
    """Reads only the tensor files listed in a manifest."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        super().__init__(str(path / TENSORS))
        self.fs = _ListedFiles([str(path / name) for name in manifest.tensor_files])


class _ListedFiles(FileSystem):
    def __init__(self, files: list[str]) -> None:
        self._files = files

    def ls(self, path: Any) -> list[str]:
        return self._files


def verify(checkpoint: Checkpoint, mesh: Mesh) -> Shards:
    """Validates the structure of a checkpoint and compares every file with its manifest. The files are distributed over the
    processes. Returns the shards of its tensors.

    Raises DamagedCheckpointError on every process, naming a damaged file.
    """
    path = checkpoint.path

    def verify_files() -> Shards:
        manifest = read_manifest(path)
        if mesh.is_main and (strays := manifest.strays(path)):
            log.info("'%s': %d files are not in its manifest and are ignored: %s", path, len(strays), strays[0])
        for name in sorted(manifest.root)[mesh.rank :: mesh.size]:
            verify_file(path, name, manifest)
        return read_structure(path, manifest, checkpoint.config.model)

    return run_on_all(mesh, verify_files, DamagedCheckpointError)[mesh.rank]


def load_weights(checkpoint: Checkpoint, model: Model, mesh: Mesh) -> None:
    """Loads weights into a model on any mesh, in any layout and dtype. Raises CheckpointError."""
    run_on_all(mesh, lambda: require_fits(checkpoint, model.model), CheckpointError)
    _load(checkpoint, named_slices(model, mesh), verify(checkpoint, mesh), mesh)


def load_training_state(checkpoint: Checkpoint, model: Model, optimizer: Optimizer, mesh: Mesh) -> Position:
    """Loads weights, optimizer state and RNG states; returns the position to resume from. Raises CheckpointError."""
    saved_by = checkpoint.config.optim.name
    if saved_by != optimizer.name:
        raise CheckpointError(
            f"'{checkpoint.path}' holds optimizer state of optim.name = '{saved_by}', which '{optimizer.name}' cannot use; "
            f"resume with optim.name = '{saved_by}', or choose another run.dir"
        )
    run_on_all(mesh, lambda: require_fits(checkpoint, model.model), CheckpointError)
    shards = verify(checkpoint, mesh)
    # A process that did not exist in the saved mesh keeps the RNG state of its own seed.
    states = {key: value for key, value in random_states(mesh).items() if key in shards}
    for part in optimizer.parts():
        _load(checkpoint, named_slices(model, mesh, [part]) | states, shards, mesh)
    restore_random_states(states)
    optimizer.updates = checkpoint.updates
    return checkpoint.position


def require_fits(checkpoint: Checkpoint, wanted: ModelConfig) -> None:
    """Raises CheckpointError unless the saved model computes the same function with the same shapes as `wanted`."""
    saved = checkpoint.config.model
    for field in type(wanted).model_fields:
        if field not in INIT_ONLY_FIELDS and getattr(saved, field) != getattr(wanted, field):
            raise CheckpointError(
                f"'{checkpoint.path}' has a different model: model.{field} = {getattr(saved, field)!r} there, "
                f"{getattr(wanted, field)!r} here; set model.{field} = {getattr(saved, field)!r} or use another checkpoint"
            )
    assert {p.name for p in parameters(saved)} == {p.name for p in parameters(wanted)}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences the warning of torch.distributed.checkpoint about running on one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _load(checkpoint: Checkpoint, wanted: dict[str, Tensor], shards: Shards, mesh: Mesh) -> None:
    if missing := wanted.keys() - shards.keys():
        raise CheckpointError(f"'{checkpoint.path}' has no tensor '{min(missing)}' ({len(missing)} are missing)")
    with quiet():
        reader = ShardReader(checkpoint.path, read_manifest(checkpoint.path))
        dcp.load(wanted, storage_reader=reader, no_dist=mesh.size == 1)
