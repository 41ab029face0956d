"""Writes a snapshot. Every process writes and hashes its shard; the main process adds state and manifest, then renames it."""

import json
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from boost.errors import NonFiniteError, StorageError
from boost.parallel.mesh import Mesh
from boost.train.checkpoint.agreement import ProcessFailure, root_cause, run_on_all, run_on_main
from boost.train.checkpoint.files import (
    OFFSETS,
    SHARDING,
    CheckpointState,
    FileEntry,
    Manifest,
    entry_of,
    new_digest,
    sync,
    write_synced,
)
from boost.train.checkpoint.folders import (
    MANIFEST_FILE,
    STATE_FILE,
    TENSORS,
    TOKENIZER_FILE,
    checkpoint_path,
    make_room,
    make_temporary,
    remove,
)
from boost.train.checkpoint.slices import LocalSlice

CHUNK_BYTES = 1 << 20
"""Bytes checked, written and hashed at a time. Fits in a core's cache; writing and hashing release the GIL."""
_DTYPES = {
    torch.float64: ("F64", np.float64),
    torch.float32: ("F32", np.float32),
    torch.float16: ("F16", np.float16),
    torch.bfloat16: ("BF16", np.uint16),  # raw bits: numpy has no bfloat16
    torch.uint8: ("U8", np.uint8),
}
_BF16_EXPONENT = 0x7F80


@dataclass(frozen=True)
class Snapshot:
    """The part of a checkpoint that one process writes."""

    state: CheckpointState
    tokenizer: bytes
    slices: list[LocalSlice]
    """In file order: wider dtypes first, so that every tensor is aligned."""

    @property
    def step(self) -> int:
        """The step that was saved."""
        return self.state.step


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that is complete on disk."""

    step: int
    path: Path
    warnings: tuple[str, ...] = ()
    """Warnings about the folder, for the user."""


def write_snapshot(
    folder: Path, snapshot: Snapshot, mesh: Mesh, group: dist.ProcessGroup | None = None
) -> SavedCheckpoint:
    """Writes the snapshots of all processes as one complete checkpoint in `folder`. `group`: process group for their communication.

    Raises StorageError on every process if one of them could not write, NonFiniteError if one of them holds a value that is not
    finite. The partial checkpoint is then removed, and earlier checkpoints are untouched.
    """
    final = checkpoint_path(folder, snapshot.step)
    temporary: Path | None = None
    try:
        temporary, warnings = run_on_main(mesh, lambda: make_temporary(folder, snapshot.step), group=group)
        path = temporary
        shards = run_on_all(mesh, lambda: _write_shard(path, snapshot, mesh), group=group)
        if problem := next((problem for _, problem in shards if problem), None):
            raise NonFiniteError(f"checkpoint of step {snapshot.step} not saved: {problem}")
        entries = {name: entry for files, _ in shards for name, entry in files.items()}

        def complete() -> list[str]:
            entries[STATE_FILE] = write_synced(path / STATE_FILE, snapshot.state.model_dump_json(indent=2).encode())
            entries[TOKENIZER_FILE] = write_synced(path / TOKENIZER_FILE, snapshot.tokenizer)
            return _publish(path, final, Manifest(entries))

        more = run_on_main(mesh, complete, group=group)
    except ProcessFailure as error:
        raise StorageError(f"checkpoint of step {snapshot.step} not saved in '{folder}': {error}") from None
    finally:
        if temporary and mesh.is_main and temporary.exists():
            remove(temporary)
    return SavedCheckpoint(snapshot.step, final, (*warnings, *more))


def finalize(temporary: Path, final: Path) -> None:
    """Completes a checkpoint written by one process: adds the manifest and renames the folder, replacing an earlier checkpoint."""
    entries = {}
    for file in sorted(path for path in temporary.rglob("*") if path.is_file()):
        sync(file)
        entries[file.relative_to(temporary).as_posix()] = entry_of(file)
    _publish(temporary, final, Manifest(entries))


def _write_shard(temporary: Path, snapshot: Snapshot, mesh: Mesh) -> tuple[dict[str, FileEntry], str | None]:
    """Writes this process's tensors. Returns the manifest entries of its files, or a description of what is wrong with a tensor."""
    where, entries = f" on process {mesh.rank}" if mesh.size > 1 else "", {}
    try:
        for number, slices in enumerate(_files(snapshot.slices)):
            name = f"{TENSORS}/shard-{mesh.rank + 1 + number * mesh.size:05d}-model-00001-of-00001.safetensors"
            with (temporary / name).open("xb") as stream:
                entries[name] = _write_tensors(stream, slices)
    except NonFiniteError as error:
        return {}, f"{error}{where}"
    except OSError as error:
        raise OSError(error.errno, f"{f'process {mesh.rank}: ' if where else ''}{root_cause(error)}") from None
    return entries, None


def _files(slices: list[LocalSlice]) -> list[list[LocalSlice]]:
    """Distributes the slices over files. One file is enough unless a tensor has several slices: names are unique within a file."""
    files: list[list[LocalSlice]] = [[]]
    seen: Counter[str] = Counter()
    for tensor in slices:
        if seen[tensor.name] == len(files):
            files.append([])
        files[seen[tensor.name]].append(tensor)
        seen[tensor.name] += 1
    return files


def _write_tensors(stream: BinaryIO, slices: list[LocalSlice]) -> FileEntry:
    """Writes and syncs a safetensors file, with the offsets of shards in the metadata that torch.distributed.checkpoint expects."""
    digest, written = new_digest(), 0
    for tensor in (None, *slices):
        if tensor is None:
            data = np.frombuffer(_header(slices), dtype=np.uint8)
        else:  # without a copy if it is contiguous and in host memory
            data = tensor.local.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        for begin in range(0, data.size, CHUNK_BYTES):
            chunk = data[begin : begin + CHUNK_BYTES]
            if tensor and not _finite(chunk, tensor.local.dtype):
                raise NonFiniteError(f"{tensor.name} holds a value that is not finite")
            stream.write(chunk.data)
            digest.update(chunk.data)
        written += data.size
    stream.flush()
    os.fsync(stream.fileno())
    return FileEntry(bytes=written, blake2b=digest.hexdigest())


def _header(slices: list[LocalSlice]) -> bytes:
    sharding = {tensor.name: {OFFSETS: list(tensor.offsets)} for tensor in slices}
    header: dict[str, Any] = {
        "__metadata__": {"DCP_VERSION": "1.0", SHARDING: json.dumps(sharding), "format": "pt"},
    }
    begin = 0
    for tensor in slices:
        end = begin + tensor.local.nbytes
        header[tensor.name] = {
            "dtype": _DTYPES[tensor.local.dtype][0],
            "shape": list(tensor.local.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _finite(chunk: npt.NDArray[np.uint8], dtype: torch.dtype) -> bool:
    if dtype == torch.uint8:
        return True
    values = chunk.view(_DTYPES[dtype][1])
    if dtype == torch.bfloat16:
        return not ((values & _BF16_EXPONENT) == _BF16_EXPONENT).any()
    return bool(np.isfinite(values).all())


def _publish(temporary: Path, final: Path, manifest: Manifest) -> list[str]:
    """Adds the manifest and renames the folder, which makes the checkpoint complete. Returns warnings."""
    manifest.write(temporary)
    sync(temporary / TENSORS)
    sync(temporary)
    replaced, warnings = make_room(final)
    temporary.rename(final)
    sync(final.parent)
    assert (final / MANIFEST_FILE).is_file(), "only complete checkpoints have a final name"
    if replaced and (problem := remove(replaced)):
        warnings.append(f"'{replaced}' cannot be removed entirely: {problem}")
    return warnings
