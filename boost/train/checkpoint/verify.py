"""Checks that a folder is a complete, undamaged checkpoint.

1. manifest.json lists every file with its size and digest (`read_manifest`). Files that it does not list are never opened.
2. Every listed file has the size (`check_size`) and the digest (`verify_file`) that the manifest gives.
3. state.json matches its schema (`CheckpointState`): a digest proves that a file matches its manifest, not that it is valid.
4. The header of each tensor file matches the file (offsets, sizes, dtypes) and the model: names, global shapes, and shards that
   cover each tensor exactly once (`read_structure`).

`verifying` does all of this except step 3, jointly on all processes. File names are checked before they are used as
paths, and nothing is unpickled.
"""

import contextlib
import errno
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, Self

import numpy as np
import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    RootModel,
    TypeAdapter,
    ValidationError,
    model_validator,
    with_config,
)
from safetensors import SafetensorError, safe_open
from typing_extensions import TypedDict

from boost.config.architecture import Parameter, parameters
from boost.config.schema import ModelConfig
from boost.errors import DamagedCheckpointError
from boost.parallel.mesh import Mesh, T
from boost.paths import file_name, is_file, read_text
from boost.text import JsonObject, brief_text
from boost.train.agreement import root_cause, run_on_all
from boost.train.checkpoint.commit import MANIFEST_FILE, STATE_FILE, TENSORS, FileEntry, entry_of
from boost.version import __version__

FORMAT: Literal[1] = 1
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64,
    "U8": torch.uint8,
}  # fmt: skip
"""The dtypes that a checkpoint may contain, by safetensors name."""
SHARDING = "DCP_SHARDING_INFO"
"""Metadata key under which torch.distributed.checkpoint stores the offsets of shards, as a JSON string."""
OFFSETS = "saved_offsets"
STEP, NEXT_SAMPLE = "step", "next_sample"
"""Metadata keys for the position of the process that wrote a tensor file, as in state.json. Files of imported weights have none."""

Counted = Annotated[int, Field(ge=0, lt=2**63)]
Index = Annotated[int, Field(ge=0, lt=2**62)]


@contextlib.contextmanager
def verifying(path: Path, model: ModelConfig, mesh: Mesh) -> "Iterator[Shards]":
    """Validates the structure of a checkpoint for `model` and yields the shards of all tensors, for a caller that reads them.
    Meanwhile, compares every file with its manifest in a second thread; files are distributed over the processes. Collective.

    Raises DamagedCheckpointError on every process, naming a damaged file: at the beginning, or at the end, after which nothing that
    was read may be used.
    """
    comparisons = list[Future[None]]()

    def begin() -> Shards:
        manifest = read_manifest(path)
        own = sorted(manifest.root)[mesh.rank :: mesh.size]
        for name in own:
            check_size(path, name, manifest)
        comparisons.extend(thread.submit(verify_file, path, name, manifest) for name in own)
        return read_structure(path, manifest, model)

    def end() -> None:
        for comparison in comparisons:
            comparison.result()

    def located(action: Callable[[], T]) -> T:
        try:
            return action()
        except (DamagedCheckpointError, OSError) as error:
            problem = (
                f"'{error.filename}' cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)
            )
            where = f" (found by process {mesh.rank})" if mesh.size > 1 else ""
            raise DamagedCheckpointError(f"{problem}{where}") from None

    thread = ThreadPoolExecutor(1, "verify")
    try:
        yield run_on_all(mesh, lambda: located(begin), DamagedCheckpointError)[mesh.rank]
        run_on_all(mesh, lambda: located(end), DamagedCheckpointError)
    finally:
        thread.shutdown(cancel_futures=True)


# The manifest.


class Manifest(RootModel[dict[str, FileEntry]]):
    """Entries by path, relative to the checkpoint, with forward slashes."""


def read_manifest(path: Path) -> Manifest:
    """Reads a checkpoint's manifest. Raises DamagedCheckpointError."""
    try:
        manifest = Manifest.model_validate(read_json(path / MANIFEST_FILE))
    except ValidationError as error:
        raise DamagedCheckpointError(f"'{path}' is damaged: {MANIFEST_FILE}: {first_problem(error)}") from None
    if STATE_FILE not in manifest.root:
        raise DamagedCheckpointError(f"'{path}' is damaged: {MANIFEST_FILE}: {STATE_FILE} is not listed")
    for name in manifest.root:
        file_name(name, path / MANIFEST_FILE, "a file", DamagedCheckpointError, nested=True)
    return manifest


def verify_file(path: Path, name: str, manifest: Manifest) -> None:
    """Compares every byte of a file with the manifest. Raises DamagedCheckpointError."""
    check_size(path, name, manifest)
    try:
        actual = entry_of(path / name)
    except OSError as error:
        raise _unreadable(path / name, error) from None
    if actual.xxh3_128 != manifest.root[name].xxh3_128:
        raise DamagedCheckpointError(f"'{path}' is damaged: {name} has changed")


def check_size(path: Path, name: str, manifest: Manifest) -> None:
    """Compares the size of a file with the manifest. Raises DamagedCheckpointError."""
    file, expected = path / name, manifest.root[name]
    try:
        if not is_file(file):
            raise DamagedCheckpointError(f"'{path}' is damaged: {name} is missing")
        size = file.stat().st_size
    except OSError as error:
        raise _unreadable(file, error) from None
    if size != expected.bytes:
        raise DamagedCheckpointError(f"'{path}' is damaged: {name} has {size} bytes instead of {expected.bytes}")


def _unreadable(file: Path, error: OSError) -> DamagedCheckpointError:
    """The error for a file that the system failed to read, which says nothing about its content."""
    return DamagedCheckpointError(
        f"'{file}' cannot be read: {error.strerror or error}; it may be intact: check the disk or the mount, then try again"
    )


def read_json(path: Path) -> JsonObject:
    """Reads a JSON object. Raises DamagedCheckpointError."""
    try:
        value = json.loads(read_text(path))
    except FileNotFoundError:
        raise DamagedCheckpointError(f"'{path.parent}' is not complete: {path.name} is missing") from None
    except OSError as error:
        raise _unreadable(path, error) from None
    except RecursionError:
        raise DamagedCheckpointError(f"'{path}' is damaged: it is nested too deeply") from None
    except ValueError as error:  # not UTF-8, not JSON, or a number with thousands of digits
        raise DamagedCheckpointError(f"'{path}' is damaged: {error}") from None
    if not isinstance(value, dict):
        raise DamagedCheckpointError(f"'{path}' is damaged: it is not a JSON object")
    return value


def first_problem(error: ValidationError) -> str:
    """The first problem in a validation error, in a few words."""
    problem = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(str(part) for part in problem["loc"])
    return f"{where}: {problem['msg']}" if where else str(problem["msg"]).removeprefix("Value error, ")


# state.json.


@dataclass(frozen=True)
class Position:
    """A run's position. Together with the configuration, it is enough to resume exactly."""

    step: int
    """Optimizer steps done. Determines the learning rate and, with `skipped`, the data position."""
    tokens: int
    """Tokens trained on."""
    skipped: int = 0
    """Steps of data that rollbacks have skipped: step n trains on the data of step n + skipped."""
    trouble: str = ""
    """Why the weights are unusable, or ''. A run resumes from such a checkpoint only by path, or if no other one is left."""
    doubt: str = ""
    """Why the weights may be unusable: training had a problem, which a run that resumes from here still has."""
    recent: dict[str, list[float]] = field(default_factory=dict, compare=False, repr=False)
    """Loss and gradient norm of recent healthy steps, for comparison with the steps after a resume (`boost.train.health`)."""


RECENT = {"loss", "gradient_norm"}
"""Keys of `Position.recent`."""


Token = Annotated[int, Field(ge=0, lt=2**32)]
EndTokens = int | list[int] | None
_OPEN = ConfigDict(extra="allow", strict=True)


@with_config(_OPEN)
class _Generation(TypedDict, total=False):
    eos_token_id: EndTokens


@with_config(_OPEN)
class _Hub(TypedDict, total=False):
    """What commands read of the settings of a Hugging Face folder."""

    tokenizer: JsonObject
    chat_templates: dict[str, str]
    generation: _Generation


@with_config(_OPEN)
class _Source(TypedDict):
    content: str


@with_config(_OPEN)
class _Traits(TypedDict, total=False):
    frozen: list[str]
    tied: list[Annotated[list[str], Field(min_length=1)]]


@with_config(_OPEN)
class CheckpointData(TypedDict, total=False):
    """What commands read of a checkpoint's data."""

    tokenizer: str | None
    content: str | None
    sources: list[_Source]
    eos: Token | None
    bos: Token | None
    context: Counted | None
    hub: _Hub | None
    parameters: _Traits | None


class CheckpointState(BaseModel):
    """Contents of state.json. Ignores unknown keys, which other releases may add."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    format: Literal[1] = FORMAT
    boost: str = __version__
    torch: str = str(torch.__version__)
    step: Counted
    tokens: Counted
    updates: Counted
    """Optimizer updates: steps, except those that changed no weights."""
    next_sample: Counted
    """Index of the next training sequence."""
    processes: Annotated[int, Field(ge=1, le=2**31)]
    skipped_steps: Counted = 0
    trouble: str = ""
    doubt: str = ""
    recent: dict[str, list[FiniteFloat]] = {}
    data: CheckpointData
    config: JsonObject

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.updates > self.step:
            raise ValueError(f"updates = {self.updates} is more than step = {self.step}")
        if (self.tokens > 0) != (self.step > 0):
            raise ValueError(f"tokens = {self.tokens} is inconsistent with step = {self.step}")
        if len(set(map(len, self.recent.values()))) > 1 or self.recent.keys() not in (set(), RECENT):
            raise ValueError(f"recent must have lists of one length, {' and '.join(sorted(RECENT))}")
        return self


# Headers of tensor files.


def open_tensors(file: Path) -> safe_open:
    """Opens a safetensors file, for a `with` block. Raises OSError or SafetensorError."""
    try:
        return safe_open(file, "pt")
    except RuntimeError as error:  # torch opens the file once more, to map it, and has no other error
        raise OSError(errno.EIO, str(error), str(file)) from None


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
    state = read_json(path / STATE_FILE)
    expected = {key: str(state.get(key)) for key in (STEP, NEXT_SAMPLE)}
    for name in sorted(n for n in manifest.root if n.startswith(f"{TENSORS}/") and n.endswith(".safetensors")):
        written, entries = _read_header(path, name)
        if any(written.get(key, "0") != value for key, value in expected.items()):
            raise DamagedCheckpointError(
                f"'{path}' is damaged: {name} was written at {_place(written)}, but {STATE_FILE} at {_place(expected)}"
            )
        for tensor, shard in entries:
            shards[tensor].append(shard)
    _check_coverage(path, shards, {parameter.name: parameter for parameter in parameters(model)})
    return shards


def _place(position: Mapping[str, str]) -> str:
    return f"step {brief_text(position.get(STEP, '0'))}, sample {brief_text(position.get(NEXT_SAMPLE, '0'))}"


def _read_header(path: Path, name: str) -> tuple[dict[str, str], list[tuple[str, StoredShard]]]:
    """The metadata of a tensor file, and its tensors, which fill it without gaps: the safetensors library checks that."""
    file = path / name

    def damaged(what: str) -> DamagedCheckpointError:
        return DamagedCheckpointError(f"'{file}' is damaged: {what}")

    try:
        with open_tensors(file) as opened:
            written = opened.metadata() or {}
            slices = {tensor: opened.get_slice(tensor) for tensor in opened.keys()}  # noqa: SIM118 (not a dict)
            entries = {tensor: (part.get_dtype(), tuple(part.get_shape())) for tensor, part in slices.items()}
        sharding = _SHARDING.validate_json(written[SHARDING]) if SHARDING in written else None
    except OSError as error:
        raise _unreadable(file, error) from None
    except SafetensorError as error:
        raise damaged(f"{root_cause(error)} (a file of {file.stat().st_size} bytes)") from None
    except ValidationError as error:
        raise damaged(f"its header is invalid: {first_problem(error)}") from None
    tensors = []
    for tensor, (dtype, shape) in entries.items():
        if dtype not in DTYPES:
            raise damaged(f"{tensor} has unknown dtype {dtype!r}; known dtypes: {', '.join(DTYPES)}")
        offsets = [0] * len(shape) if sharding is None else sharding.get(tensor, {}).get(OFFSETS)
        if offsets is None or len(offsets) != len(shape):
            raise damaged(f"{tensor} has no valid {OFFSETS} in its sharding metadata")
        tensors.append((tensor, StoredShard(name, dtype, shape, tuple(offsets))))
    return written, tensors


def _check_coverage(path: Path, shards: Shards, known: Mapping[str, Parameter]) -> None:
    for name, parts in shards.items():
        kind, _, rest = name.partition(".")
        if kind == "rng":
            if len(parts) != 1 or parts[0].dtype != "U8" or len(parts[0].shape) != 1:
                raise DamagedCheckpointError(f"'{path}' is damaged: {name} must be a single 1-D shard of dtype U8")
            continue
        parameter = known.get(rest if kind == "model" else rest.partition(".")[2])
        if kind not in ("model", "optim") or parameter is None:
            raise DamagedCheckpointError(f"'{path}' is damaged: tensor '{name}' in {parts[0].file} is not in the model")
        dtypes, wanted = {shard.dtype for shard in parts}, "I64" if parameter.is_index else "floating-point"
        if len(dtypes) != 1 or dtypes == {"U8"} or (dtypes == {"I64"}) != parameter.is_index:
            raise DamagedCheckpointError(f"'{path}' is damaged: shards of {name} lack a common {wanted} dtype")
        if problem := coverage_problem(parameter.shape, parts):
            raise DamagedCheckpointError(f"'{path}' is damaged: {name}: {problem}")
    if missing := {f"model.{name}" for name in known} - shards.keys():
        raise DamagedCheckpointError(f"'{path}' has no tensor '{min(missing)}' ({len(missing)} missing in total)")


def coverage_problem(shape: tuple[int, ...], shards: list[StoredShard]) -> str | None:
    """Why the shards do not cover a tensor of this shape exactly once; None if they do."""
    for shard in shards:
        if len(shard.shape) != len(shape):
            return f"a shard in {shard.file} has shape {list(shard.shape)}, but the tensor's shape {list(shape)} is {len(shape)}-D"
        if any(o + s > n for o, s, n in zip(shard.offsets, shard.shape, shape, strict=True)):
            return f"a shard of shape {list(shard.shape)} at {list(shard.offsets)} exceeds the shape {list(shape)} ({shard.file})"
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
