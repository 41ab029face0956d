"""Validates the headers of all tensor files of a checkpoint before any tensor is read.

A digest proves that a file matches its manifest, not that it is valid. This module checks each header against its file (offsets,
sizes, dtypes) and all headers against the model: global shapes, and shards that cover each tensor exactly once.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from boost.config.architecture import parameters
from boost.config.schema import ModelConfig
from boost.errors import DamagedCheckpointError
from boost.train.checkpoint.manifest import Manifest, first_problem

DTYPE_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "U8": 1}
"""Bytes per element of the dtypes that a checkpoint may contain, by safetensors name."""
MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors library."""
SHARDING = "DCP_SHARDING_INFO"
"""Metadata key under which torch.distributed.checkpoint stores the offsets of shards, as a JSON string."""
OFFSETS = "saved_offsets"

Index = Annotated[int, Field(ge=0, lt=2**62)]


class _Entry(BaseModel):
    model_config = ConfigDict(strict=False, extra="forbid")

    dtype: Annotated[str, Field(strict=True, max_length=10)]
    shape: Annotated[list[Annotated[Index, Field(strict=True)]], Field(max_length=8)]
    data_offsets: tuple[Annotated[Index, Field(strict=True)], Annotated[Index, Field(strict=True)]]


_ENTRIES = TypeAdapter(dict[str, _Entry])
_SHARDING = TypeAdapter(dict[str, dict[str, list[Annotated[Index, Field(strict=True)]]]])


@dataclass(frozen=True)
class StoredShard:
    """A rectangular shard of a tensor in a file."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]


Shards = Mapping[str, list[StoredShard]]
"""Shards of each tensor, by tensor name."""


def read_structure(path: Path, manifest: Manifest, model: ModelConfig) -> Shards:
    """Reads and validates the headers of all tensor files. Raises DamagedCheckpointError."""
    shards: dict[str, list[StoredShard]] = defaultdict(list)
    for name in manifest.tensor_files:
        for tensor, shard in _read_header(path, name):
            shards[tensor].append(shard)
    _check_coverage(path, shards, {parameter.name: parameter.shape for parameter in parameters(model)})
    return shards


def _read_header(path: Path, name: str) -> Iterator[tuple[str, StoredShard]]:
    def damaged(what: str) -> DamagedCheckpointError:
        return DamagedCheckpointError(f"'{path / name}' is damaged: {what}")

    header, data_bytes = _header_json(path / name)
    metadata = header.pop("__metadata__", {})
    try:
        entries = _ENTRIES.validate_python(header)
        text = metadata.get(SHARDING) if isinstance(metadata, dict) else None
        sharding = _SHARDING.validate_json(text) if text else None
    except ValidationError as error:
        raise damaged(f"its header: {first_problem(error)}") from None
    end = 0
    for tensor, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, stop = entry.data_offsets
        expected = math.prod(entry.shape) * DTYPE_BYTES.get(entry.dtype, 0)
        if entry.dtype not in DTYPE_BYTES:
            raise damaged(f"dtype {entry.dtype!r} of {tensor}; known dtypes: {', '.join(DTYPE_BYTES)}")
        if begin != end or stop - begin != expected:
            raise damaged(f"{tensor} of shape {entry.shape} does not fill bytes {begin} to {stop} after byte {end}")
        end = stop
        offsets = [0] * len(entry.shape) if sharding is None else sharding.get(tensor, {}).get(OFFSETS)
        if offsets is None or len(offsets) != len(entry.shape):
            raise damaged(f"{tensor} has no valid {OFFSETS} in its sharding metadata")
        yield tensor, StoredShard(name, entry.dtype, tuple(entry.shape), tuple(offsets))
    if end != data_bytes:
        raise damaged(f"its header describes {end} bytes of tensors, the file holds {data_bytes}")


def _header_json(file: Path) -> tuple[dict[str, Any], int]:
    """Returns the header of a safetensors file and the number of bytes after it."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > min(MAX_HEADER_BYTES, size - 8):
                raise DamagedCheckpointError(f"'{file}' is damaged: a header of {length} bytes in a file of {size}")
            header = json.loads(stream.read(length))
    except OSError as error:
        raise DamagedCheckpointError(f"'{file}' cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise DamagedCheckpointError(f"'{file}' is damaged: its header is not valid JSON") from None
    if not isinstance(header, dict):
        raise DamagedCheckpointError(f"'{file}' is damaged: its header is not a JSON object")
    return header, size - 8 - length


def _check_coverage(path: Path, shards: Shards, shapes: Mapping[str, tuple[int, ...]]) -> None:
    for name, found in shards.items():
        kind, _, rest = name.partition(".")
        if kind == "rng":
            if len(found) != 1 or found[0].dtype != "U8" or len(found[0].shape) != 1:
                raise DamagedCheckpointError(f"'{path}' is damaged: {name} is not a single RNG state")
            continue
        parameter = rest if kind == "model" else rest.partition(".")[2]
        shape = shapes.get(parameter) if kind in ("model", "optim") else None
        if shape is None:
            raise DamagedCheckpointError(f"'{path}' is damaged: the model has no tensor '{name}' ({found[0].file})")
        if len({shard.dtype for shard in found}) != 1 or found[0].dtype == "U8":
            raise DamagedCheckpointError(f"'{path}' is damaged: shards of {name} have inconsistent dtypes")
        if problem := coverage_problem(shape, found):
            raise DamagedCheckpointError(f"'{path}' is damaged: {name}: {problem}")
    if missing := {f"model.{name}" for name in shapes} - shards.keys():
        raise DamagedCheckpointError(f"'{path}' has no tensor '{min(missing)}' ({len(missing)} are missing)")


def coverage_problem(shape: tuple[int, ...], shards: list[StoredShard]) -> str | None:
    """Why the shards do not cover a tensor of this shape exactly once; None if they do."""
    for shard in shards:
        if len(shard.shape) != len(shape):
            return f"a shard of shape {list(shard.shape)} in a tensor of shape {list(shape)} ({shard.file})"
        if any(o + s > n for o, s, n in zip(shard.offsets, shard.shape, shape, strict=True)):
            return f"a shard of shape {list(shard.shape)} at {list(shard.offsets)} exceeds {list(shape)} ({shard.file})"
    covered = sum(math.prod(shard.shape) for shard in shards)
    if covered != math.prod(shape):
        return f"its shards hold {covered} numbers instead of {math.prod(shape)}"
    # Boxes [shards, dims]. Two boxes overlap if their intervals overlap in every dimension.
    begin = np.array([shard.offsets for shard in shards], dtype=np.int64).reshape(len(shards), -1)
    end = begin + np.array([shard.shape for shard in shards], dtype=np.int64).reshape(len(shards), -1)
    for i in range(len(shards) - 1):
        overlap = ((begin[i + 1 :] < end[i]) & (begin[i] < end[i + 1 :])).all(axis=1)
        if overlap.any():
            return f"shards in {shards[i].file} and {shards[i + 1 + int(overlap.argmax())].file} overlap"
    return None
