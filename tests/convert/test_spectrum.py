"""Low-rank factors from dense weights: full rank equals the dense model, and the report gives the error of lower ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from boost.convert.importing import import_weights
from boost.convert.spectrum import Truncation
from boost.errors import BoostError, ConfigError
from boost.models.init import rank_for
from tests import toy
from tests.convert.toys import all_logits, llama_folder, loaded, save

SLOTS = {
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.down": "mlp.down_proj",
}


def factor(source: Path, out: Path, **how: Any) -> dict[str, Any]:
    done = import_weights(source, out, None, None, Truncation(**how), 10**9)
    assert done.report is not None
    assert json.loads((out / "report.json").read_text()) == done.report
    return done.report


def test_full_rank_is_the_dense_model(tmp_path: Path) -> None:
    llama_folder(tmp_path / "theirs")
    import_weights(tmp_path / "theirs", tmp_path / "dense", None, None, None, 10**9)
    report = factor(tmp_path / "theirs", tmp_path / "svd", rank=32)
    dense, (svd, checkpoint) = loaded(tmp_path / "dense")[0], loaded(tmp_path / "svd")
    model = checkpoint.config.model
    # Two key/value heads of 8 are 16 wide: no rank is more than that.
    assert (model.family, model.rank, model.ranks) == ("svd", 32, {"attn.k": 16, "attn.v": 16})
    tokens, _ = toy.toy_tokens(toy.toy_config())
    expected = all_logits(dense, tokens)
    assert (all_logits(svd, tokens) - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert max(row["error"] for row in report["linears"]) < 1e-6
    assert len(report["linears"]) == 14


def test_errors_are_the_tail_of_the_singular_values(tmp_path: Path) -> None:
    tensors = llama_folder(tmp_path / "theirs")
    report = factor(tmp_path / "theirs", tmp_path / "svd", rank=10)
    rows = {row["name"]: row for row in report["linears"]}
    weights = toy.weights(loaded(tmp_path / "svd")[0])
    for slot, theirs in SLOTS.items():
        name, w = f"layers.1.{slot}", tensors[f"model.layers.1.{theirs}.weight"].double()
        values = torch.linalg.svdvals(w)
        tail = float((values[10:].square().sum() / values.square().sum()).sqrt())
        lost = w - weights[f"{name}.B"].double() @ weights[f"{name}.A"].double()
        assert rows[name]["rank"] == 10
        assert rows[name]["error"] == pytest.approx(tail, rel=1e-9)
        assert float(lost.norm() / w.norm()) == pytest.approx(tail, rel=1e-5)
        assert rows[name]["energy"] == pytest.approx(1 - tail**2, rel=1e-9)
    slots = {row["slot"]: row for row in report["slots"]}
    errors = [rows[f"layers.{n}.mlp.down"]["error"] for n in range(2)]
    assert slots["mlp.down"]["error_max"] == max(errors)
    assert slots["mlp.down"]["error_mean"] == pytest.approx(sum(errors) / 2)


@pytest.mark.parametrize("multiple", [1, 4])
def test_ranks_by_energy_go_into_the_configuration(tmp_path: Path, store: Path, multiple: int) -> None:
    """Also for our own checkpoints, including the tokenizer."""
    config = toy.toy_config("float32", model={"family": "dense", "init_std": 0.3})
    path = save(tmp_path / "c", config, store / "tokenizer.json", fingerprint="f")
    factor(path, tmp_path / "svd", energy=0.9, multiple=multiple)
    dense, (svd, checkpoint) = toy.weights(loaded(path)[0]), loaded(tmp_path / "svd")
    model = checkpoint.config.model
    for layer in range(2):
        for slot in SLOTS:
            name = f"layers.{layer}.{slot}"
            rank = rank_for(torch.linalg.svdvals(dense[f"{name}.W"].double()), 0.9, multiple)
            assert model.rank_of(layer, slot) == rank == toy.weights(svd)[f"{name}.A"].shape[0]
            assert rank % multiple == 0
    assert multiple > 1 or any(name.startswith("layers.") for name in model.ranks)
    assert checkpoint.tokenizer.is_file()
    assert checkpoint.data["eos"] == 0


def test_factors_of_narrow_weights_are_wide(tmp_path: Path) -> None:
    llama_folder(tmp_path / "theirs", torch.bfloat16)
    done = import_weights(tmp_path / "theirs", tmp_path / "svd", None, None, Truncation(rank=4), 10**9)
    assert done.dtype == "float32"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"rank": 33}, "--rank = 33 .* nearest valid value: 32"),
        ({"rank": 0}, "--rank = 0 .* nearest valid value: 1"),
        ({"energy": 1.5}, "--energy = 1.5 must be in"),
        ({"energy": 0.5, "multiple": 0}, "--multiple = 0 is too small"),
    ],
)
def test_choices_that_cannot_be(tmp_path: Path, how: dict[str, Any], message: str) -> None:
    llama_folder(tmp_path / "theirs")
    with pytest.raises(ConfigError, match=message):
        factor(tmp_path / "theirs", tmp_path / "svd", **how)
    assert not (tmp_path / "svd").exists()


def test_only_finite_dense_weights_are_factored(tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "c", toy.toy_config("float32"), store / "tokenizer.json")
    with pytest.raises(ConfigError, match=r"factorize dense weights, but .* has model\.family = 'cola'"):
        factor(path, tmp_path / "svd", rank=4)
    config = toy.toy_config("float32", model={"family": "dense", "init_std": 1e38})
    monkeypatch.setattr("boost.train.checkpoint.write._finite", lambda *_: True)  # which refuses to save it
    path = save(tmp_path / "d", config, store / "tokenizer.json")
    with pytest.raises(BoostError, match="non-finite"):
        factor(path, tmp_path / "svd", rank=4)
    assert not (tmp_path / "svd").exists()
