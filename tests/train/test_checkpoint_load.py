"""Weights without a model: read whole from a checkpoint of any mesh, and loaded on any mesh from one process's checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch

from boost.convert.importing import import_weights
from boost.errors import CheckpointError, DamagedCheckpointError
from boost.train import checkpoint as ckpt
from boost.train.checkpoint import WeightReader
from tests import toy
from tests.convert.toys import llama_folder
from tests.distributed import run_distributed

MESHES: list[dict[str, Any]] = [
    {"layout": "megatron", "tp": 2},
    {"layout": "megatron-sp", "tp": 2},
    {"layout": "megatron", "pp": 2},
    {"layout": "megatron", "dp": 2, "shard": "full"},
]


def _load_on_mesh(path: Path, parallel: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Differences of this process's weights (none expected). In float32, loaded from bfloat16."""
    found = ckpt.open_checkpoint(path)
    model = found.config.model.model_dump(exclude_none=True)
    config = toy.toy_config("float32", model=model, parallel=parallel, train={"global_batch": 8})
    built, mesh = toy.toy_model(config, seed=4)
    ckpt.load_weights(found, built, mesh)
    reader = WeightReader(found)
    names = toy.weights(built)
    whole = {name: reader.read(name).float() for name in names}
    expected = toy.local_parts(built, whole)
    return {name: value for name, value in names.items() if not torch.equal(value, expected[name])}


def test_imported_weights_on_any_mesh_and_in_another_dtype(tmp_path: Path) -> None:
    tensors = llama_folder(tmp_path / "theirs", torch.bfloat16)
    import_weights(tmp_path / "theirs", tmp_path / "c", None, None, None, 9000)
    reader = WeightReader(ckpt.open_checkpoint(tmp_path / "c"))
    assert torch.equal(reader.read("layers.1.mlp.down.W"), tensors["model.layers.1.mlp.down_proj.weight"])
    for parallel in MESHES:
        assert run_distributed(2, _load_on_mesh, tmp_path / "c", parallel) == [{}, {}], parallel


def test_a_damaged_file_is_found_before_a_weight_is_read_and_only_initial_weights_may_differ(tmp_path: Path) -> None:
    llama_folder(tmp_path / "theirs")
    import_weights(tmp_path / "theirs", tmp_path / "c", None, None, None, 10**9)
    found = ckpt.open_checkpoint(tmp_path / "c")
    model = found.config.model
    ckpt.require_fits(found, model.model_copy(update={"init_std": 0.5}))
    for field, value in (("rope_theta", 1.0), ("norm_eps", 1.0), ("mlp_silu", False), ("layers", 3)):
        with pytest.raises(CheckpointError, match=f"model.{field} = "):
            ckpt.require_fits(found, model.model_copy(update={field: value}))
    with pytest.raises(DamagedCheckpointError, match=r"has no tensor 'model\.nothing'"):
        WeightReader(found).read("nothing")
    file = next((tmp_path / "c" / "tensors").iterdir())
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match=f"{file.name} has changed"):
        WeightReader(found)
