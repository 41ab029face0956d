"""Checkpoints: sharded safetensors and JSON, nothing that needs unpickling, complete or absent.

    checkpoints/step-00000200/
        state.json                 step, data position, optimizer updates, mesh, configuration, versions
        tokenizer.json             what makes the weights usable by themselves
        tensors/shard-*.safetensors  each process's parts of weights, moments and random states (torch.distributed.checkpoint)
        manifest.json              size and BLAKE2 of every file above; written last

Tensors are saved under the names and global shapes of the mathematical parameters, never of fused or cut storage, so any mesh
and layout loads what any other saved. Everything is written into `.step-....tmp`, flushed to disk, and renamed at the end:
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
from boost.models.stored import Piece, Storage, storages
from boost.optim.adamw import Optimizer, State
from boost.parallel.mesh import Mesh
from boost.train.chunk import Chunk
from boost.train.model import Model

FORMAT = 1
INITIAL_ONLY = ("factor_init", "init_std")
"""Fields of [model] that only weights not yet trained depend on."""
_NAME = re.compile(r"step-(\d{8})")


@dataclass(frozen=True)
class Position:
    """Where training stands: enough, with the configuration, to continue as if it had never stopped."""

    step: int
    """Optimizer steps done. The data position and the learning rate are functions of it."""
    tokens: int
    """Tokens trained on."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk, opened and checked for being one of ours."""

    path: Path
    position: Position
    config: Config
    updates: int
    data: dict[str, Any]
    """What the run was trained on: fingerprints of the token store and its tokenizer. Imported weights: what came with them."""

    @property
    def tokenizer(self) -> Path:
        """The tokenizer file that belongs to the weights; imported weights may have none."""
        return self.path / "tokenizer.json"

    def require_tokenizer(self) -> str:
        """The fingerprint of the tokenizer. Raises CheckpointError if there is none."""
        if not self.tokenizer.is_file() or not self.data.get("tokenizer"):
            raise CheckpointError(
                f"'{self.path}' has no tokenizer, and without it what its tokens mean is not known; import the weights again "
                "with --tokenizer PATH (a token store will do)"
            )
        return str(self.data["tokenizer"])


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` stands once complete."""
    return folder / f"step-{step:08d}"


def complete_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints in a folder, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if _NAME.fullmatch(p.name) and (p / "manifest.json").is_file())


def find_checkpoint(path: Path) -> Path:
    """The checkpoint meant by a checkpoint, a run directory or a checkpoints folder: the newest one in it.

    Raises CheckpointError if there is none.
    """
    if (path / "state.json").is_file() or (path / "manifest.json").is_file():
        return path
    for folder in (path / "checkpoints", path):
        if found := complete_checkpoints(folder):
            return found[-1]
    if not path.exists():
        raise CheckpointError(f"no checkpoint at '{path}': there is no such folder")
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
        raise DamagedCheckpointError(f"'{path}/state.json' lacks or garbles {error}") from None
    except BoostError as error:
        raise CheckpointError(f"'{path}/state.json' holds a configuration that is not legal: {error}") from None


def verify(path: Path, mesh: Mesh) -> None:
    """Compares every file of a checkpoint with its manifest, each process its share.

    Raises DamagedCheckpointError on every process, naming a file that differs.
    """

    def verify_share() -> None:
        manifest = _read_manifest(path)
        present = {p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()} - {"manifest.json"}
        if strangers := present - manifest.keys():
            raise DamagedCheckpointError(f"'{path}' is damaged: {min(strangers)} is not in its manifest")
        for name in sorted(manifest)[mesh.rank :: mesh.size]:
            _verify_file(path, name, manifest)

    run_on_all(mesh, verify_share, DamagedCheckpointError)


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

    Raises StorageError on every process if any of them could not write; what was written is removed then, and earlier
    checkpoints are untouched.
    """
    final = checkpoint_path(folder, position.step)
    temporary = folder / f".{final.name}.tmp"
    try:
        _run_on_main(mesh, lambda: _begin(folder, temporary))
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
        _run_on_main(mesh, lambda: _write_facts(temporary, state, tokenizer))
        shares = run_on_all(mesh, lambda: _sealed_share(temporary, mesh))
        _run_on_main(mesh, lambda: _finish(temporary, final, shares))
    except _WriteFailed as error:
        if mesh.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
        raise StorageError(f"checkpoint of step {position.step} not saved in '{folder}': {error}") from None
    return final


def load_weights(checkpoint: Checkpoint, model: Model, mesh: Mesh) -> None:
    """Fills a model of any mesh, layout and dtype from a checkpoint. Raises CheckpointError."""
    _load(checkpoint, model, _named_parts(model, mesh, {}), mesh)


def load_training_state(checkpoint: Checkpoint, model: Model, optimizer: Optimizer, mesh: Mesh) -> Position:
    """Fills weights, moments and random states; returns where to continue. Raises CheckpointError."""
    saved_by = checkpoint.config.optim.name
    if saved_by != optimizer.name:
        raise CheckpointError(
            f"'{checkpoint.path}' holds the moments of optim.name = '{saved_by}', which mean nothing to '{optimizer.name}'; resume "
            f"with optim.name = '{saved_by}', or start another run.dir"
        )
    wanted = _named_parts(model, mesh, optimizer.moments)
    random_states = _random_states(mesh)
    saved = {key for key in _read_keys(checkpoint.path) if key.startswith("rng.")}
    # A process that the saved mesh did not have keeps the state that its seed gave it.
    random_states = {key: value for key, value in random_states.items() if key in saved}
    _load(checkpoint, model, wanted | random_states, mesh)
    _restore_random_states(random_states)
    optimizer.updates = checkpoint.updates
    return checkpoint.position


def remove_old(folder: Path, keep: int, mesh: Mesh) -> None:
    """Removes all but the newest `keep` complete checkpoints. Raises StorageError on every process."""

    def remove() -> None:
        for path in complete_checkpoints(folder)[:-keep]:
            # Renamed first: a folder with a checkpoint's name is complete at every instant.
            doomed = path.with_name(f".{path.name}.old")
            path.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)

    _run_on_main(mesh, remove, StorageError)


def supersede(folder: Path, step: int, mesh: Mesh) -> None:
    """Puts checkpoints of later steps aside, as `superseded-step-...`: training goes another way from `step` on, and the
    newest checkpoint must be the newest of this way. Raises StorageError on every process."""

    def put_aside() -> None:
        for path in complete_checkpoints(folder):
            if int(path.name.removeprefix("step-")) > step:
                aside = path.with_name(f"superseded-{path.name}")
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)

    _run_on_main(mesh, put_aside, StorageError)


class _WriteFailed(Exception):
    """Some process could not write; known to all of them."""


def _begin(folder: Path, temporary: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for left_over in folder.glob(".step-*"):
        shutil.rmtree(left_over)
    (temporary / "tensors").mkdir(parents=True)


def _write_tensors(temporary: Path, model: Model, optimizer: Optimizer, mesh: Mesh) -> None:
    tensors = _named_parts(model, mesh, optimizer.moments) | _random_states(mesh)
    writer = HuggingFaceStorageWriter(str(temporary / "tensors"), save_distributed=True)
    with quiet():
        dcp.save(tensors, storage_writer=writer, no_dist=mesh.size == 1)


def _write_facts(temporary: Path, state: dict[str, Any], tokenizer: Path) -> None:
    (temporary / "state.json").write_text(json.dumps(state, indent=2), encoding="utf-8")
    shutil.copyfile(tokenizer, temporary / "tokenizer.json")


def seal(temporary: Path, final: Path) -> None:
    """Completes a checkpoint that one process has written: digests of its files, and its name. An earlier one gives way."""
    _finish(temporary, final, [_sealed_share(temporary, Mesh(torch.device("cpu")))])


def _sealed_share(temporary: Path, mesh: Mesh) -> dict[str, dict[str, Any]]:
    """Manifest entries of this process's share of the files, each flushed to disk."""
    entries = {}
    for file in sorted(p for p in temporary.rglob("*") if p.is_file())[mesh.rank :: mesh.size]:
        _flush(file)
        entries[file.relative_to(temporary).as_posix()] = {"bytes": file.stat().st_size, "blake2b": _digest(file)}
    return entries


def _finish(temporary: Path, final: Path, shares: list[dict[str, dict[str, Any]]]) -> None:
    manifest = {name: entry for share in shares for name, entry in share.items()}
    (temporary / "manifest.json").write_text(json.dumps(manifest, indent=2, sort_keys=True), encoding="utf-8")
    _flush(temporary / "manifest.json")
    _flush(temporary / "tensors")
    _flush(temporary)
    replaced = final.with_name(f".{final.name}.old")
    if final.exists():  # the same step saved again after a resume from an earlier one
        final.rename(replaced)
    temporary.rename(final)
    _flush(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _named_parts(model: Model, mesh: Mesh, state: State) -> dict[str, Tensor]:
    """This process's pieces of weights, and of moments where `state` has them, under mathematical names."""
    named: dict[str, Tensor] = {}
    for storage in storages(model):
        for piece in storage.pieces():
            name, offsets = piece.parameter.name, _offsets(storage, piece, mesh)
            named[f"model.{name}"] = Chunk(piece.view(storage.tensor.detach()), piece.parameter.shape, offsets)
            for moment, value in state.get(storage.tensor, {}).items():
                named[f"optim.{moment}.{name}"] = Chunk(piece.view(value), piece.parameter.shape, offsets)
    return named


def _offsets(storage: Storage, piece: Piece, mesh: Mesh) -> tuple[int, ...]:
    """Where a piece begins in its parameter: behind the TP processes before this one, and behind its replicas' rows."""
    offsets = [0] * len(piece.parameter.shape)
    if storage.cut.dim is not None:
        offsets[storage.cut.dim] = mesh.tp.rank * (piece.parameter.shape[storage.cut.dim] // mesh.tp.size)
    offsets[0] += piece.offset
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
    """The saved model must be the one that is to be filled: same function, same shapes. Raises CheckpointError."""
    saved = checkpoint.config.model
    for field in type(wanted).model_fields:
        if field not in INITIAL_ONLY and getattr(saved, field) != getattr(wanted, field):
            raise CheckpointError(
                f"'{checkpoint.path}' is of another model: model.{field} = {getattr(saved, field)!r} there, "
                f"{getattr(wanted, field)!r} here; take model.{field} = {getattr(saved, field)!r} or another checkpoint"
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
    """Runs `action` on every process and returns all results; if it fails on any, raises `failure` on all of them.

    A failure that is nobody's fault but ours keeps its traceback where it happened, and ends the others too.
    """
    answer: tuple[str, Any] = ("", None)
    defect: BaseException | None = None
    try:
        answer = ("", action())
    except (Exception, dcp.api.CheckpointException) as error:  # the latter is no Exception
        answer = (_root_cause(error), None)
        if not isinstance(error, OSError | BoostError | MemoryError | dcp.api.CheckpointException):
            defect = error
    answers = [answer]
    if mesh.size > 1:
        answers = [answer] * mesh.size
        dist.all_gather_object(answers, answer)
    if defect:
        raise defect
    if message := next((message for message, _ in answers if message), None):
        raise (failure or _WriteFailed)(message)
    return [result for _, result in answers]


def _run_on_main(mesh: Mesh, action: Callable[[], Any], failure: type[Exception] | None = None) -> None:
    """Runs `action` on the main process while the others wait; a failure is raised on all."""
    run_on_all(mesh, action if mesh.is_main else lambda: None, failure)


def _root_cause(error: BaseException) -> str:
    """One line for what went wrong, out of the wrapping that torch.distributed.checkpoint puts around it."""
    if isinstance(error, dcp.api.CheckpointException):
        rank, (cause, _) = next(iter(error.failures.items()))
        return f"process {rank}: {_root_cause(cause)}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split()) or type(error).__name__


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """torch warns that one process is one process."""
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
        raise DamagedCheckpointError(f"'{path}' is damaged: it holds no JSON object")
    return value


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=20)).hexdigest()


def _flush(path: Path) -> None:
    """Asks the disk, not only the system, to hold a file or folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
