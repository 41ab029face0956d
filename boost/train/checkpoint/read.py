"""Verifies, loads and inspects checkpoints."""

import contextlib
import datetime
import functools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata

from boost.config.architecture import parameters
from boost.config.schema import ModelConfig
from boost.errors import BoostError, CheckpointError, DamagedCheckpointError
from boost.optim.adamw import Optimizer
from boost.parallel.mesh import Mesh
from boost.train.checkpoint.agreement import run_on_all
from boost.train.checkpoint.files import (
    Checkpoint,
    Manifest,
    Position,
    Shards,
    check_size,
    open_checkpoint,
    read_manifest,
    read_structure,
    verify_file,
)
from boost.train.checkpoint.folders import MANIFEST_FILE, STATE_FILE, TENSORS, step_of
from boost.train.checkpoint.slices import named_slices, random_states, restore_random_states
from boost.train.model import Model
from boost.train.progress import progress

INIT_ONLY_FIELDS = ("factor_init", "init_std")
"""Fields of [model] that only affect the initial weights."""

Status = Literal["complete", "superseded", "incomplete", "damaged"]


class ShardReader(HuggingFaceStorageReader):
    """Reads only the tensor files listed in a manifest, and their headers once instead of once per tensor."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        super().__init__(str(path / TENSORS))
        self.fs = _ListedFiles([str(path / name) for name in manifest.tensor_files])

    @functools.cached_property
    def _headers(self) -> Metadata:
        return super().read_metadata()

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._headers


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


# What `boost checkpoint` shows.


@dataclass(frozen=True)
class CheckpointInfo:
    """One checkpoint folder."""

    path: Path
    step: int | None
    status: Status
    """incomplete: no manifest; superseded: abandoned by a rollback or a later `--resume PATH`."""
    bytes: int
    saved: datetime.datetime
    problem: str | None = None
    """What is damaged, or that it was saved in trouble."""


def checkpoint_folders(path: Path) -> list[Path]:
    """Every checkpoint folder at a path (a run directory, a checkpoints folder, or one checkpoint), whatever its status, oldest
    first. Raises CheckpointError if there is none."""
    if (path / STATE_FILE).is_file() or (path / MANIFEST_FILE).is_file() or (path / TENSORS).is_dir():
        return [path]
    for folder in (path / "checkpoints", path):
        if folder.is_dir():
            steps = [child for child in folder.iterdir() if child.is_dir() and step_of(child) is not None]
            if steps:
                return sorted(steps, key=lambda child: (step_of(child) or 0, child.name))
    what = "no checkpoint in" if path.exists() else "no such folder:"
    raise CheckpointError(f"{what} '{path}'; pass a run directory or a step-... folder")


def inspect(path: Path) -> CheckpointInfo:
    """Inspects a checkpoint folder: manifest, file sizes, state and headers. Does not compute digests."""
    stats = [file.stat() for file in path.rglob("*") if file.is_file()]
    newest = max((stat.st_mtime for stat in stats), default=path.stat().st_mtime)
    saved = datetime.datetime.fromtimestamp(newest, datetime.UTC).astimezone()
    status: Status = "superseded" if path.name.startswith("superseded-") else "complete"
    problem = None
    if not (path / MANIFEST_FILE).is_file():
        status, problem = "incomplete", f"no {MANIFEST_FILE}"
    else:
        try:
            position = _open(path)[0].position
        except BoostError as error:
            status, problem = "damaged", str(error)
        else:
            notes = [f"unusable: {position.trouble}"] if position.trouble else []
            notes += [f"unproven: {position.doubt}"] if position.doubt else []
            problem = "; ".join(notes) or None
    return CheckpointInfo(path, step_of(path), status, sum(stat.st_size for stat in stats), saved, problem)


def problems_of(path: Path) -> list[str]:
    """Compares every byte of a checkpoint with its manifest. One line per changed file, or what else is wrong."""
    try:
        _, manifest = _open(path)
    except CheckpointError as error:
        return [str(error)]
    problems = []
    for name in progress(sorted(manifest.root), f"{path.name} (files)"):
        try:
            verify_file(path, name, manifest)
        except DamagedCheckpointError as error:
            problems.append(str(error))
    return problems


def _open(path: Path) -> tuple[Checkpoint, Manifest]:
    """Opens a checkpoint and checks everything except digests. Raises CheckpointError."""
    checkpoint, manifest = open_checkpoint(path), read_manifest(path)
    for name in manifest.root:
        check_size(path, name, manifest)
    read_structure(path, manifest, checkpoint.config.model)
    return checkpoint, manifest
