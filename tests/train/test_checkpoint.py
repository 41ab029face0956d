"""Checkpoints: bitwise on the same mesh, layout-free on another, complete or absent, and never unpickled."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from boost.config import Config
from boost.config.architecture import parameters
from boost.config.schema import OptimConfig
from boost.errors import CheckpointError, DamagedCheckpointError
from boost.train import checkpoint as ckpt
from boost.train.checkpoint import Position
from tests import toy
from tests.distributed import run_distributed
from tests.matrices import chosen
from tests.train.saves import TOKENIZER, config_on, load, mesh_config, save, save_at, state_of


def save_and_continue(folder: Path, steps: int, config: Config) -> list[tuple[float, float]]:
    trained, _ = save(folder, config)
    return [trained.step(step) for step in range(3, 3 + steps)]


def load_and_continue(folder: Path, steps: int, config: Config) -> tuple[list[tuple[float, float]], Position]:
    trained, position = load(folder, config)
    return [trained.step(step) for step in range(3, 3 + steps)], position


def on_mesh(function: Any, folder: Path, *arguments: Any) -> list[Any]:
    """Runs on as many processes as the last argument, a configuration, has."""
    size = arguments[-1].parallel.world_size
    return run_distributed(size, function, folder, *arguments) if size > 1 else [function(folder, *arguments)]


@pytest.mark.parametrize(
    "parallel",
    [
        {"tp": 1},
        {"tp": 2},
        pytest.param({"tp": 2, "dp": 2, "norm": "sync"}, marks=pytest.mark.nightly),
        pytest.param({"tp": 4, "layout": "btp-sp"}, marks=pytest.mark.nightly),
        pytest.param({"tp": 2, "layout": "vanilla"}, marks=pytest.mark.nightly),
        {"tp": 1, "pp": 2},
        pytest.param({"tp": 1, "dp": 3, "shard": "full"}, marks=pytest.mark.slow),
        pytest.param({"tp": 2, "pp": 2, "dp": 2, "layout": "btp-sp", "shard": "optimizer"}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_resume_on_the_same_mesh_is_bitwise(tmp_path: Path, parallel: dict[str, Any]) -> None:
    config = mesh_config(**parallel)
    expected = on_mesh(save_and_continue, tmp_path, 5, config)
    actual = on_mesh(load_and_continue, tmp_path, 5, config)
    assert [losses for losses, _ in actual] == expected
    assert {position for _, position in actual} == {Position(3, 192)}


def load_and_save(source: Path, target: Path, config: Config) -> None:
    trained, position = load(source, config)
    save_at(target, trained, position.step, (ckpt.find_checkpoint(source) / "tokenizer.json").read_bytes())


@pytest.mark.parametrize(
    ("family", "there"),
    chosen(
        [
            "('svd', {'tp': 2, 'dp': 2, 'layout': 'btp-cp', 'shard': 'optimizer', 'shard_outer': True})",
            "('cola', {'tp': 4, 'layout': 'vanilla', 'vanilla': 'published'})",
            "('dense', {'tp': 4, 'layout': 'megatron'})",
            "('cola', {'dp': 3, 'shard': 'optimizer'})",
            "('cola', {'cp': 2, 'tp': 2, 'shard': 'optimizer'})",
            "('dense', {'pp': 2, 'dp': 2, 'shard': 'full'})",
        ],
        [
            ("cola", {"tp": 2}),
            ("cola", {"tp": 4}),
            ("cola", {"tp": 2, "dp": 2}),
            ("cola", {"tp": 2, "grouping": False}),
            ("cola", {"tp": 4, "layout": "btp-sp"}),
            ("svd", {"tp": 2, "dp": 2, "layout": "btp-cp", "shard": "optimizer", "shard_outer": True}),
            ("cola", {"tp": 2, "dp": 2, "layout": "vanilla"}),
            ("cola", {"tp": 4, "layout": "vanilla", "vanilla": "published"}),
            ("dense", {"tp": 4, "layout": "megatron"}),
            ("dense", {"tp": 2, "layout": "megatron-sp"}),
            ("cola", {"dp": 3, "shard": "optimizer"}),
            ("cola", {"cp": 2, "tp": 2, "shard": "optimizer"}),
            ("cola", {"tp": 4, "layout": "btp-sp", "shard": "full", "shard_outer": True}),
            ("dense", {"pp": 2, "dp": 2, "shard": "full"}),
            ("svd", {"tp": 2, "pp": 2, "dp": 2, "shard": "full", "grouping": False}),
        ],
    ),
)
@pytest.mark.slow
def test_another_mesh_loads_the_same_bits_and_gives_them_back(
    tmp_path: Path, family: str, there: dict[str, Any]
) -> None:
    # Two key/value heads: fewer than four processes, so that some weights are held whole there and cut elsewhere.
    config = config_on("float32", there, family=family, kv_heads=2, tied="pp" in there or "cp" in there)
    saved, _ = save(tmp_path / "one", toy.single(config))
    on_mesh(load_and_save, tmp_path / "one", tmp_path / "two", config)
    expected, actual = state_of(saved), state_of(load(tmp_path / "two", toy.single(config))[0])
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        assert torch.equal(value, actual[name]), name


RANKS = {"attn.q": 4, "mlp.down": 12}
OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "loro": ({"name": "loro", "exact_every": 2}, {"family": "svd", "ranks": RANKS}),
    "muon": ({"name": "muon"}, {"ranks": RANKS}),
}


def optimizer_config(name: str, parallel: dict[str, Any], dtype: str = "float32") -> Config:
    optim, model = OTHERS[name]
    config = config_on(dtype, parallel, **model)
    optimizer = OptimConfig.model_validate({**optim, "weight_decay": 0.01})
    return config.model_copy(update={"optim": optimizer})


@pytest.mark.parametrize("name", [pytest.param("loro", marks=pytest.mark.slow), "muon"])
def test_every_optimizer_goes_on_bitwise_and_on_another_mesh(tmp_path: Path, name: str) -> None:
    """Saved in the middle of a cycle of LORO's exact steps, which continues after the resume."""
    config = optimizer_config(name, {"tp": 2, "layout": "btp"})
    expected = on_mesh(save_and_continue, tmp_path / "one", 3, config)
    actual = on_mesh(load_and_continue, tmp_path / "one", 3, config)
    assert [losses for losses, _ in actual] == expected
    there = optimizer_config(name, {"tp": 2, "dp": 2, "layout": "vanilla", "shard": "optimizer"})
    on_mesh(load_and_save, tmp_path / "one", tmp_path / "two", there)
    before, after = (state_of(load(tmp_path / folder, toy.single(config))[0]) for folder in ("one", "two"))
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert torch.equal(value, after[key]), key
    assert any(value.any() for key, value in before.items() if key.startswith("optim."))


def test_moments_of_another_optimizer_are_refused(tmp_path: Path) -> None:
    config = optimizer_config("loro", {"tp": 1})
    save(tmp_path, config)
    other = config.model_copy(update={"optim": OptimConfig.model_validate({})})
    with pytest.raises(CheckpointError, match=r"optim.name = 'loro', which 'adamw' cannot use") as error:
        load(tmp_path, other)
    assert "\n" not in str(error.value)


def three_dimensions(parallel: dict[str, Any], layers: int) -> Config:
    config = config_on("float32", parallel, layers=layers)
    return config.model_copy(update={"train": config.train.model_copy(update={"global_batch": 4})})


@pytest.mark.parametrize(
    ("home", "elsewhere"),
    chosen(
        ["({'dp': 2, 'tp': 2, 'shard': 'full'}, {'tp': 4, 'layout': 'btp-sp'})"],
        [
            ({"dp": 2, "tp": 2, "shard": "full"}, {"tp": 4, "layout": "btp-sp"}),
            *(({"pp": 2, "dp": 2, "tp": 2, "shard": "full"}, away) for away in ({}, {"pp": 4, "schedule": "gpipe"})),
        ],
    ),
)
@pytest.mark.slow
def test_a_run_goes_elsewhere_and_back(tmp_path: Path, home: dict[str, Any], elsewhere: dict[str, Any]) -> None:
    """Bitwise the same weights and moments on any mesh, and the same losses."""
    layers = 4 if "pp" in home else 2
    here = three_dimensions({**home, "layout": "btp", "grouping": False}, layers)
    there = three_dimensions(elsewhere, layers)
    expected = on_mesh(save_and_continue, tmp_path / "home", 3, here)[0]
    on_mesh(load_and_save, tmp_path / "home", tmp_path / "away", there)
    on_mesh(load_and_save, tmp_path / "away", tmp_path / "back", here)
    states = [state_of(load(tmp_path / name, toy.single(here))[0]) for name in ("home", "away", "back")]
    for state in states[1:]:
        assert state.keys() == states[0].keys()
        assert all(torch.equal(value, states[0][name]) for name, value in state.items())
    actual, position = on_mesh(load_and_continue, tmp_path / "home", 3, there)[0]
    assert position == Position(3, 192)
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_names_and_shapes_are_those_of_the_mathematics(tmp_path: Path) -> None:
    config = mesh_config(2)
    run_distributed(2, save_and_continue, tmp_path, 0, config)
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
    assert (state["step"], state["tokens"], state["updates"], state["next_sample"]) == (3, 192, 3, 6)
    assert (path / "tokenizer.json").read_bytes() == TOKENIZER


@pytest.mark.parametrize("harm", ["flip", "truncate", "remove"])
def test_damage_is_found_and_named(tmp_path: Path, harm: str) -> None:
    config = mesh_config(1)
    _, path = save(tmp_path, config)
    decoder, mesh = toy.toy_decoder(config, seed=9)
    before = {k: v.clone() for k, v in toy.weights(decoder).items()}
    for victim in sorted(p.relative_to(path) for p in path.rglob("*") if p.is_file()):
        file = path / victim
        sound = file.read_bytes()
        content = bytearray(sound)
        if harm == "flip":
            content[len(content) // 2] ^= 1
            file.write_bytes(content)
        elif harm == "truncate":
            file.write_bytes(content[: len(content) // 2])
        else:
            file.unlink()
        with pytest.raises(CheckpointError) as error:
            ckpt.load_weights(ckpt.open_checkpoint(path), decoder, mesh)
        # A damaged manifest accuses a file that is sound, or itself; any other damage is named.
        assert victim.name in str(error.value) or victim.name == "manifest.json", (victim, str(error.value))
        if harm != "flip":  # which is found while the tensors are read
            assert all(torch.equal(v, before[k]) for k, v in toy.weights(decoder).items())
        file.write_bytes(sound)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    """A hostile pickle under every name that a checkpoint reader might open: none is executed, or read at all if the manifest
    does not list it."""
    trained, path = save(tmp_path, mesh_config(1))
    (shard,) = (path / "tensors").iterdir()
    marker = tmp_path / "executed"

    class Hostile:
        def __reduce__(self) -> Any:
            return (Path.touch, (marker,))

    strays = (".metadata", "tensors/.metadata", "tensors/__0_0.distcp", "tensors/evil.safetensors")
    for name in (*strays, ".DS_Store", ".nfs000123", "notes.txt", f"tensors/._{shard.name}"):
        (path / name).write_bytes(pickle.dumps(Hostile()))
    expected, actual = state_of(trained), state_of(load(path, mesh_config(1))[0])
    assert all(torch.equal(value, expected[name]) for name, value in actual.items())
    (path / "state.json").write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(DamagedCheckpointError, match="state.json"):
        ckpt.open_checkpoint(path)
    assert not marker.exists()
