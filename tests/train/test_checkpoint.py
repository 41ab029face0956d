"""Checkpoints: bitwise on the same mesh, layout-free on another, complete or absent, and never unpickled."""

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from boost.config import Config
from boost.config.architecture import parameters
from boost.errors import CheckpointError, DamagedCheckpointError, StorageError
from boost.models.stored import storages
from boost.optim.adamw import build_adamw
from boost.parallel.gradients import GradientReducer
from boost.parallel.mesh import Mesh
from boost.train import checkpoint as ckpt
from boost.train.checkpoint import Position
from tests import toy
from tests.distributed import run_distributed

TOKENIZER = '{"a": "tokenizer"}'


def trained(config: Config, steps: int, seed: int = 0) -> tuple[Any, Any, Any]:
    decoder, mesh = toy.toy_decoder(config, seed)
    stored = list(storages(decoder))
    optimizer = build_adamw(stored, config.optim)
    advance(decoder, optimizer, mesh, config, range(steps))
    return decoder, optimizer, mesh


def advance(decoder: Any, optimizer: Any, mesh: Any, config: Config, steps: range) -> list[float]:
    losses = []
    reducer = GradientReducer(list(storages(decoder)), mesh)
    for step in steps:
        optimizer.zero_grad()
        loss = decoder(*toy.toy_tokens(config, seed=step)) / 32
        loss.backward()
        reducer.finish()
        optimizer.step()
        losses.append(loss.item())
    return losses


def save(folder: Path, config: Config, steps: int = 3) -> tuple[Any, Any, Any, Path]:
    decoder, optimizer, mesh = trained(config, steps)
    if mesh.is_main:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(TOKENIZER)
    return decoder, optimizer, mesh, save_at(folder, decoder, optimizer, mesh, config, steps)


def save_at(folder: Path, decoder: Any, optimizer: Any, mesh: Any, config: Config, step: int) -> Path:
    data = {"store": "s", "tokenizer": "t", "eos": 0}
    position = Position(step, step * 64)
    return ckpt.save_checkpoint(folder, decoder, optimizer, position, config, folder / "tokenizer.json", data, mesh)


def save_and_continue(folder: Path, config: Config) -> list[float]:
    decoder, optimizer, mesh, _ = save(folder, config)
    return advance(decoder, optimizer, mesh, config, range(3, 8))


def load_and_continue(folder: Path, config: Config) -> tuple[list[float], Position]:
    decoder, mesh = toy.toy_decoder(config, seed=9)
    optimizer = build_adamw(list(storages(decoder)), config.optim)
    position = ckpt.load_training_state(ckpt.open_checkpoint(folder), decoder, optimizer, mesh)
    return advance(decoder, optimizer, mesh, config, range(3, 8)), position


def mesh_config(tp: int, **parallel: Any) -> Config:
    return toy.toy_config("float64", parallel={"tp": tp, **parallel})


@pytest.mark.parametrize(
    "parallel",
    [
        {"tp": 1},
        {"tp": 2},
        {"tp": 2, "dp": 2, "norm": "sync"},
        {"tp": 4, "layout": "btp-sp"},
        {"tp": 2, "layout": "vanilla"},
    ],
    ids=str,
)
def test_resume_on_the_same_mesh_is_bitwise(tmp_path: Path, parallel: dict[str, Any]) -> None:
    config = mesh_config(**parallel)
    size = config.parallel.world_size
    expected = (
        run_distributed(size, save_and_continue, tmp_path, config)
        if size > 1
        else [save_and_continue(tmp_path, config)]
    )
    actual = (
        run_distributed(size, load_and_continue, tmp_path, config)
        if size > 1
        else [load_and_continue(tmp_path, config)]
    )
    assert [losses for losses, _ in actual] == expected
    assert {position for _, position in actual} == {Position(3, 192)}


def whole_state(folder: Path, config: Config) -> dict[str, torch.Tensor]:
    """Weights and moments as one process sees them."""
    decoder, mesh = toy.toy_decoder(toy.single(config), seed=9)
    optimizer = build_adamw(list(storages(decoder)), config.optim)
    ckpt.load_training_state(ckpt.open_checkpoint(folder), decoder, optimizer, mesh)
    return {k: v.clone() for k, v in ckpt._named_parts(decoder, mesh, optimizer.state).items()}


def load_and_save(source: Path, target: Path, config: Config) -> None:
    decoder, mesh = toy.toy_decoder(config, seed=9)
    optimizer = build_adamw(list(storages(decoder)), config.optim)
    position = ckpt.load_training_state(ckpt.open_checkpoint(source), decoder, optimizer, mesh)
    data = {"store": "s", "tokenizer": "t", "eos": 0}
    ckpt.save_checkpoint(target, decoder, optimizer, position, config, source / "tokenizer.json", data, mesh)


@pytest.mark.parametrize(
    ("family", "there"),
    [
        ("cola", {"tp": 2}),
        ("cola", {"tp": 4}),
        ("cola", {"tp": 2, "dp": 2}),
        ("cola", {"tp": 2, "grouping": False}),
        ("cola", {"tp": 4, "layout": "btp-sp"}),
        ("cola", {"tp": 2, "dp": 2, "layout": "vanilla"}),
        ("cola", {"tp": 4, "layout": "vanilla", "vanilla": "published"}),
        ("dense", {"tp": 4, "layout": "megatron"}),
        ("dense", {"tp": 2, "layout": "megatron-sp"}),
    ],
    ids=str,
)
def test_another_mesh_loads_the_same_bits_and_gives_them_back(
    tmp_path: Path, family: str, there: dict[str, Any]
) -> None:
    # Two key/value heads: fewer than four processes, so that some weights are held whole there and cut elsewhere.
    config = toy.toy_config("float32", model={"family": family, "kv_heads": 2}, parallel=there)
    save(tmp_path / "one", toy.single(config))
    run_distributed(config.parallel.world_size, load_and_save, tmp_path / "one", tmp_path / "two", config)
    expected, actual = whole_state(tmp_path / "one", config), whole_state(tmp_path / "two", config)
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        assert torch.equal(value, actual[name]), name


def test_names_and_shapes_are_those_of_the_mathematics(tmp_path: Path) -> None:
    config = mesh_config(2)
    run_distributed(2, save_and_continue, tmp_path, config)
    path = ckpt.find_checkpoint(tmp_path)
    names: set[str] = set()
    for file in (path / "tensors").iterdir():
        assert file.suffix == ".safetensors"
        with safe_open(file, framework="pt") as opened:
            names.update(opened.keys())
    expected = {
        f"{kind}.{p.name}" for p in parameters(config.model) for kind in ("model", "optim.exp_avg", "optim.exp_avg_sq")
    }
    assert names == expected | {"rng.cpu.0", "rng.cpu.1"}
    state = json.loads((path / "state.json").read_text())
    assert (state["step"], state["tokens"], state["updates"], state["next_sample"]) == (3, 192, 3, 12)
    assert (path / "tokenizer.json").read_text() == TOKENIZER


@pytest.mark.parametrize("harm", ["flip", "truncate", "remove"])
def test_damage_is_found_and_named_before_a_weight_is_touched(tmp_path: Path, harm: str) -> None:
    config = mesh_config(1)
    _, _, _, path = save(tmp_path / "good", config)
    for victim in sorted(p.relative_to(path) for p in path.rglob("*") if p.is_file()):
        shutil.copytree(path, tmp_path / "bad" / path.name)
        file = tmp_path / "bad" / path.name / victim
        content = bytearray(file.read_bytes())
        if harm == "flip":
            content[len(content) // 2] ^= 1
            file.write_bytes(content)
        elif harm == "truncate":
            file.write_bytes(content[: len(content) // 2])
        else:
            file.unlink()
        decoder, mesh = toy.toy_decoder(config, seed=9)
        before = {k: v.clone() for k, v in toy.weights(decoder).items()}
        with pytest.raises(CheckpointError) as error:
            ckpt.load_weights(ckpt.open_checkpoint(tmp_path / "bad" / path.name), decoder, mesh)
        # A damaged manifest accuses a file that is sound, or itself; any other damage is named.
        assert victim.name in str(error.value) or victim.name == "manifest.json", (victim, str(error.value))
        assert all(torch.equal(v, before[k]) for k, v in toy.weights(decoder).items())
        shutil.rmtree(tmp_path / "bad")


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    _, _, _, path = save(tmp_path, mesh_config(1))
    other = toy.toy_config("float64", model={"rank": 4})
    decoder, mesh = toy.toy_decoder(other)
    with pytest.raises(CheckpointError, match=r"another model: model.rank = 8 there, 4 here"):
        ckpt.load_weights(ckpt.open_checkpoint(path), decoder, mesh)


def test_an_interrupted_save_is_no_checkpoint_and_is_cleaned_up(tmp_path: Path) -> None:
    config = mesh_config(1)
    (tmp_path / ".step-00000009.tmp" / "tensors").mkdir(parents=True)
    (tmp_path / "step-00000008").mkdir()
    (tmp_path / "step-00000008" / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        ckpt.find_checkpoint(tmp_path)
    save(tmp_path, config)
    assert [p.name for p in ckpt.complete_checkpoints(tmp_path)] == ["step-00000003"]
    assert not list(tmp_path.glob(".step*"))


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    """A hostile pickle under every name that a checkpoint reader might open: none is executed."""
    _, _, _, path = save(tmp_path, mesh_config(1))
    marker = tmp_path / "executed"

    class Hostile:
        def __reduce__(self) -> Any:
            return (Path.touch, (marker,))

    for name in (".metadata", "tensors/.metadata", "tensors/__0_0.distcp", "tensors/evil.safetensors", "state.json"):
        (path / name).write_bytes(pickle.dumps(Hostile()))
        decoder, mesh = toy.toy_decoder(mesh_config(1))
        with pytest.raises(CheckpointError, match=Path(name).name):
            ckpt.load_weights(ckpt.open_checkpoint(path), decoder, mesh)
        assert not marker.exists(), name
        (path / name).unlink()


def save_too_much(folder: Path, config: Config) -> str:
    """Saves under a file size limit that the second process's shard exceeds; returns the error."""
    import resource
    import signal

    import torch.distributed as dist

    decoder, optimizer, mesh, _ = save(folder, config, steps=1)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, old[1]))
        with pytest.raises(StorageError) as error:
            save_at(folder, decoder, optimizer, mesh, config, 2)
        return str(error.value)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


def test_no_space_on_one_process_is_told_by_all_and_harms_nothing(tmp_path: Path) -> None:
    messages = run_distributed(2, save_too_much, tmp_path, mesh_config(2))
    for message in messages:
        assert "step 2 not saved" in message
        assert "process 1" in message
    assert [p.name for p in ckpt.complete_checkpoints(tmp_path)] == ["step-00000001"]
    ckpt.verify(ckpt.find_checkpoint(tmp_path), Mesh(toy.CPU))
    assert not list(tmp_path.glob(".step*"))


def test_later_checkpoints_are_put_aside_when_training_goes_another_way(tmp_path: Path) -> None:
    for steps in (1, 2, 3):
        save(tmp_path, mesh_config(1), steps)
    ckpt.supersede(tmp_path, 1, Mesh(toy.CPU))
    assert ckpt.find_checkpoint(tmp_path).name == "step-00000001"
    assert (tmp_path / "superseded-step-00000003" / "manifest.json").is_file(), "nothing is lost"


@pytest.mark.parametrize("content", ["[]", "{", '{"state.json": 3}', '{"state.json": {"bytes": 1}}'])
def test_a_garbled_manifest_is_damage(tmp_path: Path, content: str) -> None:
    _, _, _, path = save(tmp_path, mesh_config(1))
    (path / "manifest.json").write_text(content)
    with pytest.raises(DamagedCheckpointError, match="manifest.json"):
        ckpt.open_checkpoint(path)


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for steps in (1, 2, 3):
        save(tmp_path, mesh_config(1), steps)
    ckpt.remove_old(tmp_path, 2, Mesh(toy.CPU))
    assert [p.name for p in ckpt.complete_checkpoints(tmp_path)] == ["step-00000002", "step-00000003"]
    assert ckpt.find_checkpoint(tmp_path).name == "step-00000003"


def test_every_file_must_be_in_the_manifest(tmp_path: Path) -> None:
    _, _, _, path = save(tmp_path / "c", mesh_config(1))
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["state.json"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DamagedCheckpointError, match=r"state.json is not in its manifest"):
        ckpt.verify(path, Mesh(toy.CPU))
