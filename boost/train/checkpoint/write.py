"""Writes each process's part of a checkpoint, in the foreground or the background.

1. `CheckpointSaver` takes a `Snapshot` of this process's slices (reshard.py) and of the position. A foreground save refers to the
   weights themselves; a background save copies them to host memory, and training waits only for this copy.
2. In `write_snapshot` (on a thread in a background save), each process writes, hashes and syncs its tensors in a temporary folder;
   the main process then adds the state and the tokenizer, and commits (commit.py).
3. The main thread collects the result of a background save between two steps, after all processes have finished. At
   most one save is in flight. The processes coordinate it over a separate process group.

A background save runs in a thread rather than a process, because writing, syncing and hashing release the GIL, and a
process would need the copy in shared memory.
"""

import contextlib
import dataclasses
import datetime
import json
import logging
import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from xxhash import xxh3_128

from boost.config import Config
from boost.errors import BoostError, NonFiniteError, StorageError, TrainingError
from boost.optim.adamw import Optimizer
from boost.parallel.mesh import Mesh
from boost.paths import is_file
from boost.text import JsonObject
from boost.train.agreement import PeersLostError, ProcessFailure, root_cause, run_on_all, run_on_main
from boost.train.checkpoint.commit import (
    CHUNK_BYTES,
    STATE_FILE,
    TENSORS,
    TOKENIZER_FILE,
    FileEntry,
    checkpoint_path,
    entry_of,
    make_temporary,
    publish,
    remove,
    sync,
    write_synced,
)
from boost.train.checkpoint.reshard import Key, LocalSlice, assign, local_slices, random_states
from boost.train.checkpoint.verify import (
    NEXT_SAMPLE,
    OFFSETS,
    SHARDING,
    STEP,
    CheckpointData,
    CheckpointState,
    Position,
)
from boost.train.heartbeat import background_save
from boost.train.model import Model

log = logging.getLogger("boost")

_DTYPES = {
    torch.float64: ("F64", np.float64),
    torch.float32: ("F32", np.float32),
    torch.float16: ("F16", np.float16),
    torch.bfloat16: ("BF16", np.uint16),  # raw bits: numpy has no bfloat16
    torch.int64: ("I64", np.int64),
    torch.uint8: ("U8", np.uint8),
}
_BF16_EXPONENT = 0x7F80
NICENESS = 6
"""Lower priority of a background save: where it needs a core of the training loop, the loop keeps more than 0.7 of its speed."""
ABANDON_S = 5.0
"""How long to wait for an abandoned save to end, in seconds; it may be writing a file."""


@dataclass(frozen=True)
class Snapshot:
    """One process's part of a checkpoint."""

    state: CheckpointState
    tokenizer: bytes
    slices: list[LocalSlice]
    """In file order: wider dtypes first, so that every tensor is aligned."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """A complete checkpoint on disk."""

    step: int
    path: Path
    warnings: tuple[str, ...] = ()
    """Warnings about the folder, for the user."""


class HostBuffer:
    """Host memory for one copy of this process's slices, reused by all background saves; pinned if the weights are on a GPU."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._unpin: Callable[[], object] = lambda: None

    def reserve(self, slices: list[LocalSlice]) -> None:
        """Allocates and touches the memory, so that allocation and page faults do not slow down saves."""
        total = sum(s.local.nbytes for s in slices)
        if self._buffer.nbytes == total:
            return
        self._unpin()
        self._buffer = torch.zeros(total, dtype=torch.uint8)
        if total and any(s.local.is_cuda for s in slices):
            # torch's pinned-memory allocator would round the size up to a power of two.
            cuda, address = torch.cuda.cudart(), self._buffer.data_ptr()
            torch.cuda.check_error(cuda.cudaHostRegister(address, total, 0))
            self._unpin = weakref.finalize(self, cuda.cudaHostUnregister, address)

    def copy(self, slices: list[LocalSlice]) -> list[LocalSlice]:
        """Returns the slices with their tensors replaced by copies. Waits for the copies to finish."""
        self.reserve(slices)
        copies, begin = [], 0
        for s in slices:
            end = begin + s.local.nbytes
            copy = self._buffer[begin:end].view(s.local.dtype).view(s.local.shape)
            copies.append(dataclasses.replace(s, local=copy.copy_(s.local, non_blocking=True)))
            begin = end
        if any(s.local.is_cuda for s in slices):
            torch.cuda.current_stream().synchronize()
        return copies


class CheckpointSaver:
    """Saves one model and optimizer. All methods except `add_data`, `in_flight`, `abandon` and `close` are collective."""

    def __init__(
        self,
        model: Model,
        optimizer: Optimizer,
        config: Config,
        tokenizer: bytes,
        data: JsonObject,
        mesh: Mesh,
        guard: Callable[[Path], None] = lambda _: None,
    ) -> None:
        """`tokenizer`: contents of tokenizer.json for every checkpoint, independent of later changes to the token store. `guard`:
        called on the main process before it creates or publishes a folder in the given one; raises LostRunError if it must not."""
        self._model, self._optimizer, self._mesh, self._guard = model, optimizer, mesh, guard
        self._config, self._tokenizer, self._data = config, tokenizer, data
        self._own: tuple[object, set[Key]] | None = None
        """A division of the optimizer's state, and the slices that this process writes under it."""
        self._buffer = HostBuffer()
        self._group: dist.ProcessGroup | None = None
        self._thread: threading.Thread | None = None
        self._step = 0
        self._outcome: SavedCheckpoint | Exception | None = None

    def add_data(self, data: JsonObject) -> None:
        """Adds entries to the `data` that later checkpoints record."""
        self._data = {**self._data, **data}

    def save(self, folder: Path, position: Position) -> SavedCheckpoint:
        """Saves in the foreground. Needs no buffer. Raises the same errors as `write_snapshot`."""
        assert self._thread is None, "at most one save may be in flight"
        return write_snapshot(folder, self._snapshot(position, None), self._mesh, self._guard)

    def _snapshot(self, position: Position, buffer: HostBuffer | None) -> Snapshot:
        """This process's part of a checkpoint at the current step. Without a `buffer`, the snapshot refers to the
        weights themselves and must be written before they change."""
        state = CheckpointState(
            step=position.step,
            tokens=position.tokens,
            updates=self._optimizer.updates,
            next_sample=(position.step + position.skipped) * self._config.train.global_batch,
            skipped_steps=position.skipped,
            trouble=position.trouble,
            doubt=position.doubt,
            recent=position.recent,
            processes=self._mesh.size,
            data=cast(CheckpointData, self._data),
            config=self._config.model_dump(),
        )
        slices = self._slices()
        return Snapshot(state, self._tokenizer, buffer.copy(slices) if buffer else slices)

    def prepare(self) -> None:
        """Allocates the buffer and the process group in advance, so that the first background save does not stall training."""
        slices = self._slices()
        if self._mesh.background is not None:
            self._group = self._mesh.background.group
        elif self._group is None and self._mesh.size > 1:
            timeout = datetime.timedelta(seconds=self._config.run.save_timeout_s)
            self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._buffer.reserve(slices)

    def start(self, folder: Path, position: Position) -> None:
        """Copies weights, optimizer state and RNG states, and writes them in the background."""
        assert self._thread is None, "at most one save may be in flight"
        self.prepare()
        snapshot = self._snapshot(position, self._buffer)
        self._step, self._outcome = position.step, None
        facts = folder, snapshot, dataclasses.replace(self._mesh), self._group  # the mesh may change during the save
        self._thread = threading.Thread(target=self._write, args=facts, name="save", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the system allows no more threads
            self._thread = None
            raise

    def _write(self, folder: Path, snapshot: Snapshot, mesh: Mesh, group: dist.ProcessGroup | None) -> None:
        outcome: SavedCheckpoint | Exception
        if sys.platform == "linux":  # elsewhere, the whole process would be lowered
            with contextlib.suppress(OSError):  # a sandbox may forbid it
                os.nice(NICENESS)
        with background_save():
            try:
                outcome = write_snapshot(folder, snapshot, mesh, self._guard, group)
            except Exception as error:
                outcome = error
                abandoned = self._thread is not threading.current_thread()
                if not abandoned and not isinstance(error, BoostError | PeersLostError):
                    log.exception("the checkpoint for step %d was not saved", snapshot.state.step)
        if self._thread is threading.current_thread():
            self._outcome = outcome

    @property
    def in_flight(self) -> int | None:
        """The step of the background save that `finish` has not collected yet; None if there is none."""
        return self._step if self._thread else None

    def done_everywhere(self) -> bool:
        """Whether the save in flight has ended on all processes, so that `finish` would not wait."""
        done = self._thread is not None and not self._thread.is_alive()
        if self._mesh.size == 1:
            return done
        all_done = torch.tensor(int(done))
        dist.all_reduce(all_done, dist.ReduceOp.MIN, group=self._mesh.everyone.group)
        return bool(all_done)

    def finish(self) -> SavedCheckpoint:
        """Waits for the save in flight. If it failed, raises the errors of `write_snapshot` on all processes."""
        assert self._thread is not None, "no save is in flight"
        self._thread.join()
        outcome, self._thread = self._outcome, None

        def raise_surprise() -> None:
            if isinstance(outcome, Exception) and not isinstance(outcome, BoostError):
                raise StorageError(
                    f"the checkpoint for step {self._step} was not saved: {root_cause(outcome)}"
                ) from outcome

        # All processes see the same save errors, but only some may see a lost connection between the threads.
        try:
            run_on_all(self._mesh, raise_surprise, StorageError)
        except StorageError:
            self._group = None  # an interrupted group is out of sync; the next save creates a new one
            raise
        if isinstance(outcome, Exception):
            raise outcome
        assert outcome is not None
        return outcome

    def abandon(self) -> int | None:
        """Abandons the save in flight because the replicas change. Returns its step; None if no save was in flight."""
        step, thread = self.in_flight, self._thread
        self._thread = self._own = self._group = None
        if thread is not None:
            thread.join(ABANDON_S)
            self._buffer = HostBuffer()  # the thread may still read the old one
        return step

    def close(self, timeout_s: float) -> None:
        """Waits up to `timeout_s` for a save in flight, even after an error, because a checkpoint is worth the wait."""
        if self._thread:
            log.info("waiting for the checkpoint for step %d", self._step)
            self._thread.join(timeout_s)
        if self._group and self._mesh.background is None and not (self._thread and self._thread.is_alive()):
            dist.destroy_process_group(self._group)
        self._group = None

    def _slices(self) -> list[LocalSlice]:
        """Views of the weights and moments that this process writes, and its RNG states. Replicas hold the same slices, but each
        has one writer. Collective if the optimizer state was resharded."""
        mesh, division = self._mesh, self._optimizer.division
        held = local_slices(self._model, mesh, self._optimizer.parts())
        if self._own is None or self._own[0] != division:
            sizes = {(s.name, s.offsets): s.local.nbytes for s in held}
            self._own = division, assign(run_on_all(mesh, lambda: sizes))[mesh.rank]
        own = [s for s in held if (s.name, s.offsets) in self._own[1]]
        # Wider dtypes first, so that every tensor in a file is aligned.
        return sorted([*own, *random_states(mesh)], key=lambda s: (-s.local.element_size(), s.name, s.offsets))


def write_snapshot(
    folder: Path,
    snapshot: Snapshot,
    mesh: Mesh,
    guard: Callable[[Path], None] = lambda _: None,
    group: dist.ProcessGroup | None = None,
) -> SavedCheckpoint:
    """Writes the snapshots of all processes as one complete checkpoint in `folder`. `group`: process group for their communication.
    `guard`: as in `CheckpointSaver`.

    Raises StorageError on every process if any of them could not write, NonFiniteError if any of them holds a value that is not
    finite, TrainingError if the processes are not at the same step of the same data, and LostRunError if the guard does. In all
    cases, removes the partial checkpoint and leaves earlier checkpoints untouched.
    """
    step = snapshot.state.step
    final = checkpoint_path(folder, step)
    temporary: Path | None = None
    try:

        def begin() -> tuple[Path, list[str]]:
            guard(folder)
            return make_temporary(folder, step)

        temporary, warnings = run_on_main(mesh, begin, group=group)
        path = temporary
        shards = run_on_all(mesh, lambda: _write_shard(path, snapshot, mesh), group=group)
        if problem := next((problem for _, problem, _ in shards if problem), None):
            raise NonFiniteError(f"the checkpoint for step {step} was not saved: {problem}")
        places = [place for *_, place in shards]
        if other := next((rank for rank, place in enumerate(places) if place != places[0]), None):
            raise TrainingError(
                f"process {other} is at {_said(places[other])}, but process 0 is at {_said(places[0])}: they no longer train one "
                f"model, so nothing was saved; resume with --resume auto"
            )
        entries = {name: entry for files, *_ in shards for name, entry in files.items()}

        def complete() -> list[str]:
            guard(folder)
            entries[STATE_FILE] = write_synced(path / STATE_FILE, snapshot.state.model_dump_json(indent=2).encode())
            entries[TOKENIZER_FILE] = write_synced(path / TOKENIZER_FILE, snapshot.tokenizer)
            return publish(path, final, entries)

        more = run_on_main(mesh, complete, group=group)
    except ProcessFailure as error:
        raise StorageError(f"the checkpoint for step {step} was not saved in '{folder}': {error}") from None
    finally:
        if temporary and mesh.is_main:
            remove(temporary)  # which has another name now if the save succeeded
    return SavedCheckpoint(step, final, (*warnings, *more))


def _said(place: Mapping[str, str]) -> str:
    return f"step {place[STEP]}, sample {place[NEXT_SAMPLE]}"


def _write_shard(
    temporary: Path, snapshot: Snapshot, mesh: Mesh
) -> tuple[dict[str, FileEntry], str | None, dict[str, str]]:
    """Writes this process's tensors. Returns the manifest entries of its files, or the reason why a tensor cannot be saved, and
    this process's position, which its files record."""
    where, entries = f" on process {mesh.rank}" if mesh.size > 1 else "", {}
    place = {STEP: str(snapshot.state.step), NEXT_SAMPLE: str(snapshot.state.next_sample)}
    # One file is enough unless a tensor has several slices, because names must be unique within a file.
    files: list[list[LocalSlice]] = [[]]
    seen: Counter[str] = Counter()
    for tensor in snapshot.slices:
        if seen[tensor.name] == len(files):
            files.append([])
        files[seen[tensor.name]].append(tensor)
        seen[tensor.name] += 1
    try:
        for number, slices in enumerate(files):
            name = f"{TENSORS}/shard-{mesh.rank + 1 + number * mesh.size:05d}-model-00001-of-00001.safetensors"
            with (temporary / name).open("xb") as stream:
                entries[name] = _write_tensors(stream, slices, place)
    except NonFiniteError as error:
        return {}, f"{error}{where}", place
    except OSError as error:
        raise OSError(error.errno, f"{f'process {mesh.rank}: ' if where else ''}{root_cause(error)}") from None
    return entries, None, place


def _write_tensors(stream: BinaryIO, slices: list[LocalSlice], place: Mapping[str, str]) -> FileEntry:
    """Checks, hashes, writes and syncs the tensors of a safetensors file, with the offsets of shards in the metadata that
    torch.distributed.checkpoint expects."""
    header = _header(slices, place)
    stream.write(header)
    digest = xxh3_128(header)
    for tensor in slices:
        data = tensor.local.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        for begin in range(0, data.size, CHUNK_BYTES):
            chunk = data[begin : begin + CHUNK_BYTES]
            if not _finite(chunk, tensor.local.dtype):
                raise NonFiniteError(f"{tensor.name} holds a value that is not finite")
            digest.update(chunk.data)
            stream.write(chunk.data)
    stream.flush()
    os.fsync(stream.fileno())
    return FileEntry(bytes=stream.tell(), xxh3_128=digest.hexdigest())


def _header(slices: list[LocalSlice], place: Mapping[str, str]) -> bytes:
    sharding = {tensor.name: {OFFSETS: list(tensor.offsets)} for tensor in slices}
    metadata = {"DCP_VERSION": "1.0", SHARDING: json.dumps(sharding), "format": "pt", **place}
    header: JsonObject = {"__metadata__": metadata}
    begin = 0
    for tensor in slices:
        end = begin + tensor.local.nbytes
        dtype, shape = _DTYPES[tensor.local.dtype][0], list(tensor.local.shape)
        header[tensor.name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _finite(chunk: npt.NDArray[np.uint8], dtype: torch.dtype) -> bool:
    if not dtype.is_floating_point:
        return True
    values = chunk.view(_DTYPES[dtype][1])
    if dtype == torch.bfloat16:
        return not ((values & _BF16_EXPONENT) == _BF16_EXPONENT).any()
    return bool(np.isfinite(values).all())


def fallback_folder(config: Config) -> Path | None:
    """Folder for a run's last checkpoint if run.dir is not writable: `run.fallback_dir` followed by the real path of run.dir
    (without links), so that several runs can share it. None if run.fallback_dir is not set."""
    if not config.run.fallback_dir:
        return None
    run = Path(config.run.dir).resolve()
    return Path(config.run.fallback_dir, *run.parts[1:], "checkpoints")


# Weights without a run (imported, converted, or from `boost.Model`), which one process writes tensor by tensor.


def finish_weights(
    temporary: Path, final: Path, config: Config, data: JsonObject, texts: Iterable[tuple[str, str]]
) -> None:
    """Adds the state at step 0, before any optimizer update, and the files in `texts`. Moves the complete checkpoint to its final
    path, where it replaces an earlier one."""
    state = CheckpointState(
        step=0,
        tokens=0,
        updates=0,
        next_sample=0,
        processes=1,
        data=cast(CheckpointData, data),
        config=config.model_dump(),
    )
    for name, text in ((STATE_FILE, json.dumps(state.model_dump(), indent=2)), *texts):
        (temporary / name).write_text(text, encoding="utf-8")
    entries = {}
    for file in sorted(path for path in temporary.rglob("*") if is_file(path)):
        sync(file)
        entries[file.relative_to(temporary).as_posix()] = entry_of(file)
    publish(temporary, final, entries)
