"""Checkpoints: sharded safetensors and JSON, no pickle; a checkpoint is complete or does not exist.

    checkpoints/step-00000200/
        state.json                 step, data position, optimizer updates, mesh, configuration, versions
        tokenizer.json             makes the weights usable without the token store
        tensors/shard-*.safetensors  each process's shards of weights, moments and RNG states (torch.distributed.checkpoint)
        manifest.json              size and BLAKE2 digest of every file above; written last

Tensors are saved under the names and global shapes of the mathematical parameters, never of fused or sharded storage, so any
mesh and layout loads what any other saved. Everything is written into `.step-....tmp`, synced to disk, and renamed at the end:
a folder with the final name is complete.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

from boost import __version__
from boost.config import Config
from boost.config.architecture import parameters
from boost.config.load import from_tree
from boost.config.schema import ModelConfig
from boost.errors import BoostError, CheckpointError, DamagedCheckpointError, StorageError
from boost.models.fused import FusedParam, ParamSlice, fused_params
from boost.optim.adamw import Optimizer, State
from boost.parallel.mesh import Mesh
from boost.train.model import Model
from boost.train.tensor_slice import TensorSlice

FORMAT = 1
INIT_ONLY_FIELDS = ("factor_init", "init_std")
"""Fields of [model] that affect initial weights only."""
_NAME = re.compile(r"step-(\d{8})")


@dataclass(frozen=True)
class Position:
    """The position of a run: together with the configuration, enough to resume as if it had never stopped."""

    step: int
    """Optimizer steps done. The data position and the learning rate are functions of it."""
    tokens: int
    """Tokens trained on."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk, with its state read and checked."""

    path: Path
    position: Position
    config: Config
    updates: int
    data: dict[str, Any]
    """Fingerprints of the token store and tokenizer of the run. Imported weights: what came with them."""

    @property
    def tokenizer(self) -> Path:
        """The tokenizer file of the weights; imported weights may have none."""
        return self.path / "tokenizer.json"

    def require_tokenizer(self) -> str:
        """The fingerprint of the tokenizer. Raises CheckpointError if there is none."""
        if not self.tokenizer.is_file() or not self.data.get("tokenizer"):
            raise CheckpointError(
                f"'{self.path}' has no tokenizer, so the meaning of its tokens is unknown; import the weights again "
                "with --tokenizer PATH (a token store will do)"
            )
        return str(self.data["tokenizer"])


def checkpoint_path(folder: Path, step: int) -> Path:
    """Path of the complete checkpoint of `step`."""
    return folder / f"step-{step:08d}"


def complete_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints in a folder, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if _NAME.fullmatch(p.name) and (p / "manifest.json").is_file())


def find_checkpoint(path: Path) -> Path:
    """The checkpoint at a path: itself, or the newest one in a run directory or checkpoints folder.

    Raises CheckpointError if there is none.
    """
    if (path / "state.json").is_file() or (path / "manifest.json").is_file():
        return path
    for folder in (path / "checkpoints", path):
        if found := complete_checkpoints(folder):
            return found[-1]
    if not path.exists():
        raise CheckpointError(f"no checkpoint at '{path}': no such folder")
    raise CheckpointError(f"no complete checkpoint in '{path}'; name a run directory or a step-... folder")


def open_checkpoint(path: Path) -> Checkpoint:
    """Reads and checks everything but the tensors. Raises CheckpointError."""
    path = find_checkpoint(path)
    _verify_file(path, "state.json", _read_manifest(path))
    state = _read_json(path / "state.json")
    if state.get("format") != FORMAT:
        raise CheckpointError(f"'{path}' has checkpoint format {state.get('format')!r}; this version reads {FORMAT}")
    try:
        config = from_tree(state["config"])
        position = Position(int(state["step"]), int(state["tokens"]))
        return Checkpoint(path, position, config, int(state["updates"]), dict(state["data"]))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedCheckpointError(f"'{path}/state.json' has a missing or malformed field: {error}") from None
    except BoostError as error:
        raise CheckpointError(f"'{path}/state.json' has an invalid configuration: {error}") from None


def verify(path: Path, mesh: Mesh) -> None:
    """Compares every file of a checkpoint with its manifest; the files are divided among the processes.

    Raises DamagedCheckpointError on every process, naming a file that differs.
    """

    def verify_files() -> None:
        manifest = _read_manifest(path)
        present = {p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()} - {"manifest.json"}
        if unexpected := present - manifest.keys():
            raise DamagedCheckpointError(f"'{path}' is damaged: {min(unexpected)} is not in its manifest")
        for name in sorted(manifest)[mesh.rank :: mesh.size]:
            _verify_file(path, name, manifest)

    run_on_all(mesh, verify_files, DamagedCheckpointError)


def _verify_file(path: Path, name: str, manifest: dict[str, dict[str, Any]]) -> None:
    file, expected = path / name, manifest.get(name)
    if expected is None:
        raise DamagedCheckpointError(f"'{path}' is damaged: {name} is not in its manifest")
    if not file.is_file():
        raise DamagedCheckpointError(f"'{path}' is damaged: {name} is missing")
    if file.stat().st_size != expected["bytes"]:
        raise DamagedCheckpointError(
            f"'{path}' is damaged: {name} has {file.stat().st_size} bytes instead of {expected['bytes']}"
        )
    if _digest(file) != expected["blake2b"]:
        raise DamagedCheckpointError(f"'{path}' is damaged: {name} has changed")


def _read_manifest(path: Path) -> dict[str, dict[str, Any]]:
    manifest = _read_json(path / "manifest.json")
    for name, entry in manifest.items():
        if not isinstance(entry, dict) or not {"bytes", "blake2b"} <= entry.keys():
            raise DamagedCheckpointError(f"'{path}' is damaged: manifest.json has no size and digest for {name}")
    return manifest


def save_checkpoint(
    folder: Path,
    model: Model,
    optimizer: Optimizer,
    position: Position,
    config: Config,
    tokenizer: Path,
    data: dict[str, Any],
    mesh: Mesh,
) -> Path:
    """Saves from all processes; returns the complete checkpoint's folder.

    Raises StorageError on every process if any of them could not write; the partial checkpoint is then removed, and earlier
    checkpoints are untouched.
    """
    final = checkpoint_path(folder, position.step)
    temporary = folder / f".{final.name}.tmp"
    try:
        _run_on_main(mesh, lambda: _prepare_folder(folder, temporary))
        run_on_all(mesh, lambda: _write_tensors(temporary, model, optimizer, mesh))
        state = {
            "format": FORMAT,
            "boost": __version__,
            "torch": torch.__version__,
            "step": position.step,
            "tokens": position.tokens,
            "updates": optimizer.updates,
            "next_sample": position.step * config.train.global_batch,
            "processes": mesh.size,
            "data": data,
            "config": config.model_dump(),
        }
        _run_on_main(mesh, lambda: _write_state(temporary, state, tokenizer))
        shares = run_on_all(mesh, lambda: _manifest_entries(temporary, mesh))
        _run_on_main(mesh, lambda: _publish(temporary, final, shares))
    except _WriteError as error:
        if mesh.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
        raise StorageError(f"checkpoint of step {position.step} not saved in '{folder}': {error}") from None
    return final


def load_weights(checkpoint: Checkpoint, model: Model, mesh: Mesh) -> None:
    """Loads weights into a model on any mesh, in any layout and dtype. Raises CheckpointError."""
    _load(checkpoint, model, _named_slices(model, mesh, {}), mesh)


def load_training_state(checkpoint: Checkpoint, model: Model, optimizer: Optimizer, mesh: Mesh) -> Position:
    """Loads weights, optimizer state and RNG states; returns the position to resume from. Raises CheckpointError."""
    saved_by = checkpoint.config.optim.name
    if saved_by != optimizer.name:
        raise CheckpointError(
            f"'{checkpoint.path}' holds the optimizer state of optim.name = '{saved_by}', which '{optimizer.name}' cannot use; "
            f"resume with optim.name = '{saved_by}', or choose another run.dir"
        )
    wanted = _named_slices(model, mesh, optimizer.moments)
    random_states = _random_states(mesh)
    saved = {key for key in _read_keys(checkpoint.path) if key.startswith("rng.")}
    # A process that the saved mesh did not have keeps the state from its own seed.
    random_states = {key: value for key, value in random_states.items() if key in saved}
    _load(checkpoint, model, wanted | random_states, mesh)
    _restore_random_states(random_states)
    optimizer.updates = checkpoint.updates
    return checkpoint.position


def remove_old(folder: Path, keep: int, mesh: Mesh) -> None:
    """Removes all but the newest `keep` complete checkpoints. Raises StorageError on every process."""

    def remove() -> None:
        for path in complete_checkpoints(folder)[:-keep]:
            # Renamed first: a folder with a checkpoint's name is complete at all times.
            removed = path.with_name(f".{path.name}.old")
            path.rename(removed)
            shutil.rmtree(removed, ignore_errors=True)

    _run_on_main(mesh, remove, StorageError)


def supersede(folder: Path, step: int, mesh: Mesh) -> None:
    """Renames checkpoints of later steps to `superseded-step-...`: training branches off at `step`, and the newest
    checkpoint must be one of this branch. Raises StorageError on every process."""

    def set_aside() -> None:
        for path in complete_checkpoints(folder):
            if int(path.name.removeprefix("step-")) > step:
                aside = path.with_name(f"superseded-{path.name}")
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)

    _run_on_main(mesh, set_aside, StorageError)


class _WriteError(Exception):
    """A process could not write. Raised on all of them."""


def _prepare_folder(folder: Path, temporary: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob(".step-*"):
        shutil.rmtree(stale)
    (temporary / "tensors").mkdir(parents=True)


def _write_tensors(temporary: Path, model: Model, optimizer: Optimizer, mesh: Mesh) -> None:
    tensors = _named_slices(model, mesh, optimizer.moments) | _random_states(mesh)
    writer = HuggingFaceStorageWriter(str(temporary / "tensors"), save_distributed=True)
    with quiet():
        dcp.save(tensors, storage_writer=writer, no_dist=mesh.size == 1)


def _write_state(temporary: Path, state: dict[str, Any], tokenizer: Path) -> None:
    (temporary / "state.json").write_text(json.dumps(state, indent=2), encoding="utf-8")
    shutil.copyfile(tokenizer, temporary / "tokenizer.json")


def finalize(temporary: Path, final: Path) -> None:
    """Completes a checkpoint written by one process: adds the manifest and renames it, replacing an earlier one."""
    _publish(temporary, final, [_manifest_entries(temporary, Mesh(torch.device("cpu")))])


def _manifest_entries(temporary: Path, mesh: Mesh) -> dict[str, dict[str, Any]]:
    """Manifest entries of this process's part of the files, after syncing each to disk."""
    entries = {}
    for file in sorted(p for p in temporary.rglob("*") if p.is_file())[mesh.rank :: mesh.size]:
        _fsync(file)
        entries[file.relative_to(temporary).as_posix()] = {"bytes": file.stat().st_size, "blake2b": _digest(file)}
    return entries


def _publish(temporary: Path, final: Path, shares: list[dict[str, dict[str, Any]]]) -> None:
    manifest = {name: entry for share in shares for name, entry in share.items()}
    (temporary / "manifest.json").write_text(json.dumps(manifest, indent=2, sort_keys=True), encoding="utf-8")
    _fsync(temporary / "manifest.json")
    _fsync(temporary / "tensors")
    _fsync(temporary)
    replaced = final.with_name(f".{final.name}.old")
    if final.exists():  # the same step saved again after a resume from an earlier one
        final.rename(replaced)
    temporary.rename(final)
    _fsync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _named_slices(model: Model, mesh: Mesh, state: State) -> dict[str, Tensor]:
    """This process's slices of weights, and of moments where `state` has them, under mathematical names."""
    named: dict[str, Tensor] = {}
    for fused in fused_params(model):
        for param_slice in fused.local_slices():
            name, offsets = param_slice.parameter.name, _offsets(fused, param_slice, mesh)
            named[f"model.{name}"] = TensorSlice(
                param_slice.view(fused.tensor.detach()), param_slice.parameter.shape, offsets
            )
            for moment, value in state.get(fused.tensor, {}).items():
                named[f"optim.{moment}.{name}"] = TensorSlice(
                    param_slice.view(value), param_slice.parameter.shape, offsets
                )
    return named


def _offsets(fused: FusedParam, param_slice: ParamSlice, mesh: Mesh) -> tuple[int, ...]:
    """Offsets of a slice in its parameter: after the slices of lower TP ranks and the rows of other replicas."""
    offsets = [0] * len(param_slice.parameter.shape)
    if fused.placement.dim is not None:
        offsets[fused.placement.dim] = mesh.tp.rank * (param_slice.parameter.shape[fused.placement.dim] // mesh.tp.size)
    offsets[0] += param_slice.offset
    return tuple(offsets)


def _random_states(mesh: Mesh) -> dict[str, Tensor]:
    states = {f"rng.cpu.{mesh.rank}": torch.get_rng_state()}
    if mesh.device.type == "cuda":
        states[f"rng.cuda.{mesh.rank}"] = torch.cuda.get_rng_state(mesh.device)
    return states


def _restore_random_states(states: dict[str, Tensor]) -> None:
    for key, value in states.items():
        if key.startswith("rng.cpu."):
            torch.set_rng_state(value)
        else:
            torch.cuda.set_rng_state(value)


def _load(checkpoint: Checkpoint, model: Model, wanted: dict[str, Tensor], mesh: Mesh) -> None:
    run_on_all(mesh, lambda: require_fits(checkpoint, model.model), CheckpointError)
    verify(checkpoint.path, mesh)
    missing = wanted.keys() - _read_keys(checkpoint.path)
    if missing:
        raise CheckpointError(f"'{checkpoint.path}' has no tensor '{min(missing)}' ({len(missing)} are missing)")
    reader = HuggingFaceStorageReader(str(checkpoint.path / "tensors"))
    with quiet():
        dcp.load(wanted, storage_reader=reader, no_dist=mesh.size == 1)


def require_fits(checkpoint: Checkpoint, wanted: ModelConfig) -> None:
    """Raises CheckpointError unless the saved model has the same function and shapes as `wanted`."""
    saved = checkpoint.config.model
    for field in type(wanted).model_fields:
        if field not in INIT_ONLY_FIELDS and getattr(saved, field) != getattr(wanted, field):
            raise CheckpointError(
                f"'{checkpoint.path}' has another model: model.{field} = {getattr(saved, field)!r} there, "
                f"{getattr(wanted, field)!r} here; set model.{field} = {getattr(saved, field)!r} or use another checkpoint"
            )
    assert {p.name for p in parameters(saved)} == {p.name for p in parameters(wanted)}


def _read_keys(path: Path) -> set[str]:
    """Names of all saved tensors, from the headers of the safetensors files."""
    from safetensors import SafetensorError, safe_open

    keys: set[str] = set()
    for file in (path / "tensors").glob("*.safetensors"):
        try:
            with safe_open(file, framework="pt") as opened:
                keys.update(opened.keys())
        except SafetensorError as error:
            raise DamagedCheckpointError(f"'{file}' is damaged: {error}") from None
    return keys


def run_on_all(mesh: Mesh, action: Callable[[], Any], failure: type[Exception] | None = None) -> list[Any]:
    """Runs `action` on every process and returns all results by rank; if it fails on any, raises `failure` on all of them.

    A bug (no OSError or BoostError) is re-raised as it is where it happened, and as `failure` on the others.
    """
    outcome: tuple[str, Any] = ("", None)
    bug: BaseException | None = None
    try:
        outcome = ("", action())
    except (Exception, dcp.api.CheckpointException) as error:  # the latter is not an Exception
        outcome = (_root_cause(error), None)
        if not isinstance(error, OSError | BoostError | MemoryError | dcp.api.CheckpointException):
            bug = error
    outcomes = [outcome]
    if mesh.size > 1:
        outcomes = [outcome] * mesh.size
        dist.all_gather_object(outcomes, outcome)
    if bug:
        raise bug
    if message := next((message for message, _ in outcomes if message), None):
        raise (failure or _WriteError)(message)
    return [result for _, result in outcomes]


def _run_on_main(mesh: Mesh, action: Callable[[], Any], failure: type[Exception] | None = None) -> None:
    """Runs `action` on the main process while the others wait; raises a failure on all."""
    run_on_all(mesh, action if mesh.is_main else lambda: None, failure)


def _root_cause(error: BaseException) -> str:
    """One line for the error inside the wrapper of torch.distributed.checkpoint."""
    if isinstance(error, dcp.api.CheckpointException):
        rank, (cause, _) = next(iter(error.failures.items()))
        return f"process {rank}: {_root_cause(cause)}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split()) or type(error).__name__


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences the warning of torch.distributed.checkpoint about running on one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DamagedCheckpointError(f"'{path.parent}' is not complete: {path.name} is missing") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DamagedCheckpointError(f"'{path}' is damaged: {error}") from None
    if not isinstance(value, dict):
        raise DamagedCheckpointError(f"'{path}' is damaged: it is not a JSON object")
    return value


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=20)).hexdigest()


def _fsync(path: Path) -> None:
    """Syncs a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
