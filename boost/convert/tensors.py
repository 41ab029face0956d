"""Reads a safetensors folder one tensor at a time, and writes one file at a time. Never unpickles anything."""

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from boost.config.architecture import Parameter
from boost.config.schema import ModelConfig
from boost.convert.formats import Entry, read_json
from boost.errors import CheckpointError, StorageError
from boost.paths import file_name
from boost.text import JsonObject
from boost.train.agreement import root_cause
from boost.train.checkpoint.verify import open_tensors

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class Weights(Protocol):
    """Weights to import, read one parameter at a time."""

    model: ModelConfig
    context: int
    eos: int | None
    start: int | None
    """Token that a prompt starts with."""
    starts_as_tokenizer: bool
    """Whether a tokenizer determines the start token; `start` then applies only if there is no tokenizer."""
    tokenizer: Path | None
    hub: JsonObject
    """Settings of the original Hugging Face folder (`boost.convert.vocabulary`)."""
    notes: list[str]
    """What the folder has and an import does not use."""
    untied: int
    """Parameters added by reading a tied table as two tensors."""
    dtype: torch.dtype
    """The narrowest dtype that represents all weights exactly."""

    def read(self, parameter: Parameter) -> Tensor:
        """Returns the full parameter, on the CPU."""


class TensorFolder:
    """The tensors in a Hugging Face folder: one or more safetensors files, with or without an index."""

    def __init__(self, path: Path) -> None:
        """Reads only the headers. Raises CheckpointError, naming the file."""
        self.path = path
        self._file_of: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, str] = {}
        files = self._files()
        used = {INDEX if len(files) > 1 or files[0].name != SINGLE else SINGLE, *(file.name for file in files)}
        others = {file.name for kind in ("*.safetensors", "pytorch_model*.bin") for file in path.glob(kind)}
        others |= {INDEX} if (path / INDEX).is_file() else set()
        self.notes: list[str] = []
        if unread := sorted(others - used):
            more = f" and {len(unread) - 1} more" if len(unread) > 1 else ""
            self.notes.append(
                f"the weights are those in {files[0].name}{f' to {files[-1].name}' * (len(files) > 1)}, as transformers loads "
                f"them; '{path}' also has {unread[0]}{more}, which import does not read"
            )
        for file in files:
            try:
                with open_tensors(file) as opened:
                    for name in opened.keys():  # noqa: SIM118 (not a dictionary)
                        self._file_of[name] = file
                        header = opened.get_slice(name)
                        self.shapes[name] = tuple(header.get_shape())
                        self._dtypes[name] = str(header.get_dtype())
            except (SafetensorError, OSError) as error:
                raise _unreadable(file, error) from None

    def _files(self) -> list[Path]:
        """The files that transformers loads: model.safetensors, even next to an index; otherwise the files in the index."""
        if (self.path / "adapter_config.json").is_file():  # transformers would load its base model and apply it
            raise CheckpointError(
                f"'{self.path}' has an adapter (adapter_config.json), which import does not apply; merge it with peft: "
                f"AutoPeftModelForCausalLM.from_pretrained({str(self.path)!r}).merge_and_unload().save_pretrained(PATH), or "
                "remove adapter_config.json to import the weights without it"
            )
        if (single := self.path / SINGLE).is_file():
            return [single]
        index = read_json(self.path / INDEX, "fix it, or save the model again")
        if index:
            weight_map = index.get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise CheckpointError(f"'{self.path / INDEX}' has no valid weight_map; fix it, or save the model again")
            names = {file_name(name, self.path / INDEX, "weight_map", CheckpointError) for name in weight_map.values()}
            present = {file.name for file in self.path.iterdir() if file.is_file()}
            for name in sorted(names):
                if name not in present:
                    raise CheckpointError(f"'{self.path / INDEX}' lists the missing file {name!r}; download it")
            return [self.path / name for name in sorted(names)]
        files = sorted(filter(Path.is_file, self.path.glob("*.safetensors")))
        if len(files) > 1:
            raise CheckpointError(
                f"'{self.path}' has {len(files)} safetensors files ({files[0].name}, {files[1].name}, ...), but no {INDEX} that "
                f"says which are its weights; download it, or name the file with all weights {SINGLE}"
            )
        if files:
            return files
        if pickles := sorted(file.name for pattern in _PICKLES for file in self.path.glob(pattern)):
            raise CheckpointError(
                f"'{self.path}' stores its weights as a pickle ({pickles[0]}), which can execute code when loaded; if you "
                "trust it, convert it to safetensors: model.save_pretrained(PATH, safe_serialization=True)"
            )
        raise CheckpointError(f"'{self.path}' contains no safetensors file; pass a Hugging Face folder with weights")

    def check(self, wanted: Iterable[Entry], optional: frozenset[str]) -> None:
        """Raises CheckpointError unless the folder has exactly these tensors with these shapes.

        `optional`: names that may be missing. Rotary frequencies, which old checkpoints store, are ignored.
        """
        expected = {entry.name: entry.shape for entry in wanted}
        if missing := [name for name in expected if name not in self.shapes and name not in optional]:
            raise CheckpointError(
                f"'{self.path}' has no tensor {missing[0]!r}{_more(missing, 'missing')}; check that config.json belongs to "
                "these weights"
            )
        unexpected = [name for name in self.shapes if name not in expected and not name.endswith("rotary_emb.inv_freq")]
        if unexpected:
            raise CheckpointError(
                f"'{self.path}' has an unexpected tensor {min(unexpected)!r}{_more(unexpected, 'unexpected')}; check that "
                "config.json belongs to these weights"
            )
        for name, shape in expected.items():
            if (stored := self.shapes.get(name, shape)) != shape:
                raise CheckpointError(
                    f"'{self.path}': tensor '{name}' has shape {list(stored)}, but config.json implies {list(shape)}; "
                    "check that config.json belongs to these weights"
                )

    def dtype(self, names: Iterable[str]) -> torch.dtype:
        """Returns the narrowest dtype that represents all of these tensors exactly. Raises CheckpointError for other dtypes."""
        example = {self._dtypes[name]: name for name in names}
        if unsupported := [dtype for dtype in example if dtype not in _FLOATS]:
            raise CheckpointError(
                f"'{self.path}': tensor {example[unsupported[0]]!r} has dtype {unsupported[0]}, which is not supported; import "
                f"the original weights (supported: {', '.join(_FLOATS)})"
            )
        return functools.reduce(torch.promote_types, (_FLOATS[dtype] for dtype in example))

    def read(self, name: str) -> Tensor:
        """Reads one tensor into CPU memory. Opens the file each time, because mapped pages would count toward memory use. Raises
        CheckpointError."""
        try:
            with open_tensors(self._file_of[name]) as opened:
                return opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise _unreadable(self._file_of[name], error) from None


def _unreadable(file: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"'{file}' is damaged or is not a safetensors file: {root_cause(error)}")


def _more(names: list[str], what: str) -> str:
    return f" ({len(names)} are {what})" if len(names) > 1 else ""


class TensorWriter:
    """Writes tensors, in the order of the `add` calls, to files of at most `limit` bytes (or of one larger tensor). Holds one file
    in memory at a time. After `close`, the files are named `{stem}.safetensors` or `{stem}-00001-of-00003.safetensors`, ..."""

    def __init__(self, folder: Path, stem: str, limit: int) -> None:
        folder.mkdir(exist_ok=True)
        self._folder, self._stem, self._limit = folder, stem, limit
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._written: list[tuple[Path, list[str]]] = []
        self.total_bytes = 0
        self.parameters = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Adds a tensor, and writes the file if it is full. Raises StorageError."""
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self._limit:
            self._flush()
        self._pending[name] = tensor.contiguous()
        self._pending_bytes += size
        self.total_bytes += size
        self.parameters += tensor.numel()

    def close(self) -> dict[str, str]:
        """Writes the last file and renames all files; returns the file name for each tensor. Raises StorageError."""
        self._flush()
        count = len(self._written)
        weight_map: dict[str, str] = {}
        for number, (path, names) in enumerate(self._written, start=1):
            part = f"-{number:05d}-of-{count:05d}" if count > 1 else ""
            final = path.rename(self._folder / f"{self._stem}{part}.safetensors")
            weight_map |= dict.fromkeys(names, final.name)
        return weight_map

    def _flush(self) -> None:
        path = self._folder / f".{self._stem}-{len(self._written):05d}.part"
        try:
            save_file(self._pending, path, metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            raise StorageError(f"'{self._folder}' cannot be written: {error}") from None
        self._written.append((path, list(self._pending)))
        self._pending, self._pending_bytes = {}, 0


def dtype_name(dtype: torch.dtype) -> str:
    """Returns 'bfloat16' for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")
