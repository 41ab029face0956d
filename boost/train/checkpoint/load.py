"""Finds a checkpoint, opens it, and reads its weights, optimizer state and position.

1. `find_checkpoint` resolves the user's path to a folder.
2. `open_checkpoint` reads state.json and checks its digest, position, configuration and data before anything is allocated.
   `read_checkpoint` also reads the tensors, and starts again if a live run has removed the checkpoint meanwhile.
3. `load_weights` and `load_training_state` check that the model fits (`require_fits`) and that tensors are complete (verify.py).
   Then each process loads the slices that it holds (reshard.py), while another thread compares the files with their digests.

`WeightReader` reads whole parameters without a model, for conversion to other formats.
"""

import contextlib
import functools
import hashlib
import itertools
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from torch import Tensor

from boost.config import Config
from boost.config.architecture import parameters
from boost.config.load import from_tree
from boost.config.schema import ModelConfig
from boost.errors import BoostError, CheckpointError, DamagedCheckpointError, RemovedCheckpointError
from boost.optim.adamw import Optimizer
from boost.parallel.mesh import Mesh
from boost.paths import is_file, status
from boost.text import JsonObject, brief
from boost.train.agreement import root_cause, run_on_all, run_on_main
from boost.train.checkpoint.commit import (
    MANIFEST_FILE,
    STATE_FILE,
    TOKENIZER_FILE,
    checkpoint_path,
    complete_checkpoints,
    read_best,
    step_folders,
    step_of,
)
from boost.train.checkpoint.reshard import LocalSlice, local_slices, random_states, restore_random_states
from boost.train.checkpoint.verify import (
    DTYPES,
    FORMAT,
    CheckpointState,
    Manifest,
    Position,
    Shards,
    StoredShard,
    first_problem,
    open_tensors,
    read_json,
    read_manifest,
    verify_file,
    verifying,
)
from boost.train.model import Model
from boost.train.rundir import BEST

log = logging.getLogger("boost")

Result = TypeVar("Result")

ATTEMPTS = 5
"""How many checkpoints of a live run are tried before giving up."""
HUB = "hub"
"""Key in a checkpoint's data: extra content of the weights' Hugging Face folder, such as a chat template."""
TRAITS = "parameters"
"""Key in a checkpoint's data: the names of frozen and of tied parameters, if it was saved from Python."""
INIT_ONLY_FIELDS = ("factor_init", "init_std")
"""Fields of [model] that only affect the initial weights."""
PREFIX = "model."
"""Prefix of the weights' names in a checkpoint."""


def find_checkpoint(path: Path) -> Path:
    """Resolves a path to a checkpoint: the path itself, or the newest checkpoint in a run directory or checkpoints
    folder. A path that ends in `@best` selects the checkpoint with the lowest held-out loss.

    Raises CheckpointError if there is none.
    """
    if path.name.endswith(BEST) and not status(path):
        run = Path(str(path).removesuffix(BEST))
        for folder in (run / "checkpoints", run):
            if best := read_best(folder):
                return checkpoint_path(folder, best.step)
        raise CheckpointError(
            f"'{run}{BEST}': no best checkpoint is recorded, because train.keep_best was false or no evaluation has run yet; "
            f"use '{find_checkpoint(run)}', the newest checkpoint"
        )
    if is_file(path / STATE_FILE) or is_file(path / MANIFEST_FILE):
        return path
    # Twice, because a live run may replace every checkpoint while the first list is made.
    for folder in 2 * (path / "checkpoints", path):
        if complete := complete_checkpoints(folder):
            return complete[-1]
    if not status(path):
        raise CheckpointError(f"no checkpoint at '{path}': no such folder")
    raise CheckpointError(f"no complete checkpoint in '{path}'; pass a run directory or a step-... folder")


def incomplete_warnings(folder: Path, candidates: Collection[Path]) -> list[str]:
    """Warnings about step folders without a manifest that are newer than every complete checkpoint. Saves never leave such folders;
    the manifest was removed later. Opening `candidates` reports it."""
    warnings: list[str] = []
    with contextlib.suppress(OSError):
        for path in reversed(step_folders(folder)):
            if is_file(path / MANIFEST_FILE):
                break
            if path not in candidates:
                warnings.insert(0, f"'{path}' has no {MANIFEST_FILE}, so it is incomplete and was skipped")
    return warnings


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk, with its state read and checked."""

    path: Path
    manifest: Manifest = field(compare=False, repr=False)
    position: Position
    config: Config
    updates: int
    data: JsonObject
    """Fingerprints of the run's token store and tokenizer; for imported weights, only their tokenizer's."""

    @property
    def tokenizer(self) -> Path:
        """Path of the tokenizer file. Imported weights may have none."""
        return self.path / TOKENIZER_FILE

    @property
    def context(self) -> int:
        """Context length of the model in tokens: this run's sequence length or, if longer, that of earlier training."""
        before = self.data.get("context")
        return max(self.config.train.seq_len, before if isinstance(before, int) else 0)

    def require_tokenizer(self) -> str:
        """The tokenizer's fingerprint. Raises CheckpointError if there is no tokenizer."""
        if not is_file(self.tokenizer) or not self.data.get("tokenizer"):
            raise CheckpointError(
                f"'{self.path}' has no tokenizer, so the meaning of its tokens is unknown; import the weights again "
                "with --tokenizer PATH (such as a token store)"
            )
        return str(self.data["tokenizer"])


def open_checkpoint(path: Path) -> Checkpoint:
    """Reads and checks everything except the tensors. Raises CheckpointError."""
    return read_checkpoint(path, lambda checkpoint: checkpoint)


def read_checkpoint(path: Path, read: Callable[[Checkpoint], Result], mesh: Mesh | None = None) -> Result:
    """Opens the checkpoint that `find_checkpoint` finds and returns `read(checkpoint)`. If a live run removes that checkpoint
    meanwhile, starts again with the newest one, unless `path` is the removed checkpoint's.

    With a mesh, it is collective: all processes read the same checkpoint, and `read` must fail on all of them or on none. Raises
    CheckpointError; RemovedCheckpointError if the checkpoint is gone.
    """
    mesh = mesh or Mesh(torch.device("cpu"))
    left, pauses = ATTEMPTS, iter(SETTLE_PAUSES_S)
    while True:
        found, identity = run_on_main(mesh, lambda: (now := find_checkpoint(path), folder_identity(now)), BoostError)
        try:
            return read(open_on_all(found, mesh, pauses=pauses))
        except (BoostError, OSError) as error:
            if run_on_main(mesh, functools.partial(folder_identity, found)) in (identity, ()):
                raise
            left -= 1
            if found == path or not left:
                raise RemovedCheckpointError(
                    f"'{found}' was rotated away by its run while it was read; read a newer checkpoint, or keep more of them "
                    "(train.keep)"
                ) from error
            log.warning(
                "'%s' was rotated away by its run while it was read; reading the newest checkpoint instead", found
            )


def folder_identity(path: Path) -> tuple[int, ...] | None:
    """Identifies the folder that has this path now; None if there is none, and () if the system cannot tell. Changes if it is
    removed, renamed or replaced."""
    real = path.resolve()
    try:
        # A network file system may remember the status of a folder that is gone.
        about = status(real) if status(real.parent) and real.name in os.listdir(real.parent) else None
    except OSError:
        return ()
    return about and (about.st_dev, about.st_ino)


def _open_folder(path: Path) -> Checkpoint:
    manifest = read_manifest(path)
    verify_file(path, STATE_FILE, manifest)
    raw = read_json(path / STATE_FILE)
    if raw.get("format") != FORMAT:
        raise CheckpointError(f"'{path}' has checkpoint format {raw.get('format')!r:.40}; this version reads {FORMAT}")
    try:
        state = CheckpointState.model_validate(raw)
        config = from_tree(state.config)
    except ValidationError as error:
        raise DamagedCheckpointError(f"'{path}/{STATE_FILE}' is damaged: {first_problem(error)}") from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedCheckpointError(f"'{path}/{STATE_FILE}' has a malformed configuration: {error}") from None
    except BoostError as error:
        raise CheckpointError(f"'{path}/{STATE_FILE}' has an invalid configuration: {error}") from None
    traits = state.data.get("parameters") or {}
    names = {*traits.get("frozen", ()), *itertools.chain(*traits.get("tied", ()))}
    if names and (unknown := names - {parameter.name for parameter in parameters(config.model)}):
        raise DamagedCheckpointError(
            f"'{path}' is damaged: {STATE_FILE} names a parameter that is not in the model: {brief(min(unknown))}"
        )
    if (named := step_of(path)) not in (None, state.step):
        raise DamagedCheckpointError(f"'{path}' is damaged: {STATE_FILE} has step = {state.step} instead of {named}")
    trained = state.step + state.skipped_steps
    if state.next_sample != trained * config.train.global_batch:
        raise DamagedCheckpointError(
            f"'{path}' is damaged: {STATE_FILE} has next_sample = {state.next_sample} instead of "
            f"{trained * config.train.global_batch} ({trained} x global batch {config.train.global_batch})"
        )
    marks = state.trouble, state.doubt, state.recent
    position = Position(state.step, state.tokens, state.skipped_steps, *marks)
    return Checkpoint(path, manifest, position, config, state.updates, dict(state.data))


SETTLE_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Pauses between attempts to open a checkpoint that only some processes can read. NFS clients cache what a folder contains for up
to 60 s."""


def open_on_all(
    path: Path,
    mesh: Mesh,
    check: Callable[[Checkpoint], object] = lambda _: None,
    pauses: Iterator[float] | None = None,
) -> Checkpoint:
    """Opens the checkpoint in a folder on all processes and checks that all of them read the same one. `check` raises an error if
    it does not fit this run. Collective.

    If only some processes can read it, tries again for a minute, or after each of the `pauses` that are left, in seconds. Raises
    DamagedCheckpointError on every process, naming the process and the file, or the error of `open_checkpoint` or `check` if it
    does not depend on what a process can read.
    """
    for pause in itertools.chain(SETTLE_PAUSES_S if pauses is None else pauses, [None]):
        found: list[Checkpoint] = []

        def look(found: list[Checkpoint] = found) -> tuple[str, str]:
            try:
                found.append(_open_folder(path))
            except (DamagedCheckpointError, OSError) as error:
                return "", str(error)
            check(found[0])
            return hashlib.sha256(found[0].manifest.model_dump_json().encode()).hexdigest(), ""

        seen = run_on_all(mesh, look, BoostError)
        digests = {digest for digest, _ in seen}
        if len(digests) == 1:
            if found:
                return found[0]
            raise DamagedCheckpointError(seen[0][1])
        if pause is not None:
            time.sleep(pause)
    for rank, (digest, problem) in enumerate(seen):
        if not digest:
            raise DamagedCheckpointError(f"process {rank} cannot read what other processes can: {problem}")
    other = next(rank for rank, (digest, _) in enumerate(seen) if digest != seen[0][0])
    raise DamagedCheckpointError(f"processes 0 and {other} read different versions of '{path}/{MANIFEST_FILE}'")


def require_fits(checkpoint: Checkpoint, wanted: ModelConfig) -> None:
    """Raises CheckpointError if the saved model's function or shapes differ from those of `wanted`."""
    saved = checkpoint.config.model
    for name in type(wanted).model_fields:
        if name not in INIT_ONLY_FIELDS and getattr(saved, name) != getattr(wanted, name):
            raise CheckpointError(
                f"'{checkpoint.path}' has a different model: model.{name} is {getattr(saved, name)!r} instead of "
                f"{getattr(wanted, name)!r}; set model.{name} = {getattr(saved, name)!r}, or use another checkpoint"
            )
    assert {p.name for p in parameters(saved)} == {p.name for p in parameters(wanted)}


def load_weights(checkpoint: Checkpoint, model: Model, mesh: Mesh) -> None:
    """Loads weights into a model on any mesh, with any layout and dtype. Raises CheckpointError; the weights may then be
    anything."""
    run_on_all(mesh, lambda: require_fits(checkpoint, model.model), CheckpointError)
    with verifying(checkpoint.path, checkpoint.config.model, mesh) as shards:
        _read(local_slices(model, mesh), checkpoint.path, shards, mesh)


def load_training_state(checkpoint: Checkpoint, model: Model, optimizer: Optimizer, mesh: Mesh) -> Position:
    """Loads weights, optimizer state and RNG states; returns the position to resume from. Raises CheckpointError; the weights and
    the optimizer state may then be anything."""
    saved_by = checkpoint.config.optim.name
    if saved_by != optimizer.name:
        raise CheckpointError(
            f"'{checkpoint.path}' holds optimizer state for optim.name = '{saved_by}', which '{optimizer.name}' cannot use; "
            f"resume with optim.name = '{saved_by}', or choose another run.dir"
        )
    run_on_all(mesh, lambda: require_fits(checkpoint, model.model), CheckpointError)
    with verifying(checkpoint.path, checkpoint.config.model, mesh) as shards:
        # A process that did not exist in the saved mesh keeps the RNG state that follows from its own seed.
        states = [state for state in random_states(mesh) if state.name in shards]
        _read(local_slices(model, mesh, optimizer.parts()) + states, checkpoint.path, shards, mesh)
    run_on_all(mesh, lambda: restore_random_states(states, checkpoint.path), CheckpointError)
    optimizer.updates = checkpoint.updates
    return checkpoint.position


def _read(wanted: Sequence[LocalSlice], path: Path, shards: Shards, mesh: Mesh) -> None:
    """Fills this process's slices from all files that hold parts of them. Collective. Raises CheckpointError on all processes."""

    def read() -> None:
        if missing := {s.name for s in wanted} - shards.keys():
            raise CheckpointError(f"'{path}' has no tensor '{min(missing)}' ({len(missing)} missing in total)")
        for s in wanted:
            if s.name.startswith("rng.") and shards[s.name][0].shape != s.shape:
                raise DamagedCheckpointError(
                    f"'{path}' has a random state, {s.name}, of {shards[s.name][0].shape[0]} bytes, but torch {torch.__version__} "
                    f"needs {s.shape[0]}; resume with the version of torch that saved it, or from another checkpoint"
                )
        try:
            read_slices(wanted, path, shards)
        except (OSError, SafetensorError) as error:
            where = f" by process {mesh.rank}" if mesh.size > 1 else ""
            raise DamagedCheckpointError(f"'{path}' cannot be read{where}: {root_cause(error)}") from error

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # it copies at the memory's speed; more threads would wait for a core that hashes
    try:
        run_on_all(mesh, read, CheckpointError)
    finally:
        torch.set_num_threads(threads)


def read_slices(wanted: Sequence[LocalSlice], path: Path, shards: Shards) -> None:
    """Copies what the files hold of the slices. Opens each file once. Raises OSError or SafetensorError."""
    by_file = defaultdict[str, list[tuple[StoredShard, LocalSlice]]](list)
    for s in wanted:
        for shard in shards[s.name]:
            by_file[shard.file].append((shard, s))
    for file, pairs in by_file.items():
        with open_tensors(path / file) as opened:
            for shard, s in pairs:
                # Per dimension: where the intersection begins in the shard, where in the slice, and its length.
                ranges = list[tuple[int, int, int]]()
                for there, n, here, m in zip(shard.offsets, shard.shape, s.offsets, s.local.shape, strict=True):
                    begin = max(there, here)
                    ranges.append((begin - there, begin - here, min(there + n, here + m) - begin))
                if all(length > 0 for *_, length in ranges):
                    source = tuple(slice(begin, begin + length) for begin, _, length in ranges)
                    target = tuple(slice(begin, begin + length) for _, begin, length in ranges)
                    s.local[target].copy_(opened.get_slice(s.name)[source])


class WeightReader:
    """Reads the full weights of a checkpoint saved on any mesh, one parameter at a time. Verifies every file first.

    Raises DamagedCheckpointError if a file has changed.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._path, self._mesh = checkpoint.path, Mesh(torch.device("cpu"))
        with verifying(self._path, checkpoint.config.model, self._mesh) as shards:
            self._shards = shards
        self._shapes = {parameter.name: parameter.shape for parameter in parameters(checkpoint.config.model)}

    def names(self) -> list[str]:
        """Names of all parameters, sorted."""
        return sorted(self._shapes)

    def dtype(self, name: str) -> torch.dtype:
        """The dtype in which a parameter was saved."""
        return DTYPES[self._shards[f"{PREFIX}{name}"][0].dtype]

    def read(self, name: str) -> Tensor:
        """The full parameter, on the CPU, in the dtype in which it was saved."""
        if name not in self._shapes:
            raise DamagedCheckpointError(f"'{self._path}' has no tensor '{PREFIX}{name}'")
        shape = self._shapes[name]
        whole = torch.empty(shape, dtype=self.dtype(name))
        _read([LocalSlice(f"{PREFIX}{name}", whole, shape, (0,) * len(shape))], self._path, self._shards, self._mesh)
        return whole
