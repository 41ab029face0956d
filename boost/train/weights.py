"""Reads and writes weights-only checkpoints tensor by tensor, without a model. Used for conversion to and from other formats."""

import contextlib
import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from boost.config import Config
from boost.errors import DamagedCheckpointError, StorageError
from boost.parallel.mesh import Mesh
from boost.train.checkpoint import Checkpoint, finalize, verify
from boost.train.checkpoint.files import CheckpointState, read_manifest
from boost.train.checkpoint.read import ShardReader, quiet

PREFIX = "model."
"""Prefix of weights among the tensors of a checkpoint."""


class WeightReader:
    """Reads the full weights of a checkpoint saved on any mesh, one parameter at a time. Verifies every file first.

    Raises DamagedCheckpointError if a file has changed.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        verify(checkpoint, Mesh(torch.device("cpu")))
        self._path = checkpoint.path
        self._reader = ShardReader(checkpoint.path, read_manifest(checkpoint.path))
        self._tensors = self._reader.read_metadata().state_dict_metadata

    def _metadata(self, name: str) -> TensorStorageMetadata:
        metadata = self._tensors.get(f"{PREFIX}{name}")
        if not isinstance(metadata, TensorStorageMetadata):
            raise DamagedCheckpointError(f"'{self._path}' has no tensor '{PREFIX}{name}'")
        return metadata

    def names(self) -> list[str]:
        """Names of all parameters, sorted."""
        return sorted(name.removeprefix(PREFIX) for name in self._tensors if name.startswith(PREFIX))

    def dtype(self, name: str) -> torch.dtype:
        """The dtype in which a parameter was saved."""
        return self._metadata(name).properties.dtype

    def read(self, name: str) -> Tensor:
        """The full parameter, on the CPU, in the dtype in which it was saved."""
        metadata = self._metadata(name)
        whole = torch.empty(metadata.size, dtype=metadata.properties.dtype)
        with quiet():
            dcp.load({f"{PREFIX}{name}": whole}, storage_reader=self._reader, no_dist=True)
        return whole


def weights_state(config: Config, data: dict[str, Any]) -> dict[str, Any]:
    """The content of `state.json` for weights at step 0, before any optimizer update."""
    state = CheckpointState(
        step=0, tokens=0, updates=0, next_sample=0, processes=1, data=data, config=config.model_dump()
    )
    return state.model_dump()


@contextlib.contextmanager
def writing_weights(final: Path, field: str) -> Iterator[Path]:
    """An empty temporary folder for a weights-only checkpoint, next to its final path, to which `finish_weights` moves it. It is
    removed in any case. Raises StorageError, naming the `field` of the path, if something cannot be written."""
    temporary = final.resolve().with_name(f".{final.resolve().name}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        (temporary / "tensors").mkdir(parents=True)
        yield temporary
    except OSError as error:
        raise StorageError(f"{field} = '{final}' cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def finish_weights(temporary: Path, final: Path, state: dict[str, Any], texts: Iterable[tuple[str, str]]) -> None:
    """Writes the state, the files in `texts` and the manifest, and moves the complete checkpoint to its final path."""
    for name, text in (("state.json", json.dumps(state, indent=2)), *texts):
        (temporary / name).write_text(text, encoding="utf-8")
    finalize(temporary, final)
