"""Initial weights are a function of seed and name, with the published standard deviations."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from boost.config import Config
from boost.config.architecture import parameter_count, parameters
from boost.config.load import load
from boost.models import init
from boost.models.init import initial_value
from tests import toy


def test_same_seed_same_weights_whatever_the_order() -> None:
    config = toy.toy_config()
    whole = {p.name: initial_value(p, config.model, 3) for p in reversed(list(parameters(config.model)))}
    decoder, _ = toy.toy_decoder(config, seed=3)
    for name, value in toy.weights(decoder).items():
        assert torch.equal(value, whole[name].double()), name
    other, _ = toy.toy_decoder(config, seed=4)
    assert not torch.equal(toy.weights(other)["embed"], toy.weights(decoder)["embed"])
    q, k = whole["layers.0.attn.q.A"], whole["layers.1.attn.q.A"]
    assert not torch.equal(q, k), "each parameter has a draw of its own"


def draws(**model: Any) -> tuple[Config, dict[str, Tensor]]:
    """Every initial weight of a 128 x 352 model whose key/value heads have 32 columns, fp64."""
    rank = {} if model["family"] == "dense" else {"rank": 32}
    config = toy.toy_config(model={"dim": 128, "ffn_dim": 352, **rank, **model})
    return config, {p.name: initial_value(p, config.model, 0).double() for p in parameters(config.model)}


@pytest.mark.parametrize("family", ["cola", "svd", "dense"])
def test_standard_deviation_of_each_factor(family: str) -> None:
    config, values = draws(family=family)
    for p in parameters(config.model):
        value = values[p.name]
        if "norm" in p.name:
            assert bool((value == 1).all())
            continue
        width = {"attn.q": 256, "attn.o": 256, "attn.k": 160, "attn.v": 160}.get(p.name[9:15], 480)
        expected = {
            "cola": 32**-0.25 * width**-0.25,
            "svd": math.sqrt(2 / sum(p.shape)),
            "dense": 0.02,
        }[family if p.name.startswith("layers") else "dense"]
        assert value.std().item() == pytest.approx(expected, rel=0.05), p.name


def test_spectral_factors_are_the_best_of_their_rank_for_the_dense_weights() -> None:
    config, factors = draws(family="svd", factor_init="spectral", ranks={"mlp.down": 48, "attn.v": 40})
    _, whole = draws(family="dense")
    for name in [name.removesuffix(".W") for name in whole if name.endswith(".W")]:
        a, b = factors[f"{name}.A"], factors[f"{name}.B"]
        rank = config.model.rank_of(0, name.split(".", 2)[2])
        assert a.shape[0] == b.shape[1] == rank
        u, s, vt = torch.linalg.svd(whole[f"{name}.W"], full_matrices=False)
        s[rank:] = 0
        torch.testing.assert_close(b @ a, u @ s.diag() @ vt, rtol=0, atol=1e-6 * s[0].item())
        # Balanced: the factors share the singular values, so that their Gram matrices are equal and diagonal.
        kept = min(rank, len(s))
        gram = s[:kept].diag()
        for product in (b.T @ b, a @ a.T):
            torch.testing.assert_close(product[:kept, :kept], gram, rtol=0, atol=1e-5 * s[0].item())
        if kept < rank:  # key/value heads have 32 columns, but rank 40
            assert not b[:, kept:].any() and a[kept:].std().item() == pytest.approx(config.model.init_std, rel=0.1)
    assert torch.equal(factors["embed"], whole["embed"]), "all else is as in the dense model"


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("grouping", [True, False])
@pytest.mark.parametrize("factor_init", ["spectral", "cola"])
@pytest.mark.parametrize("most", [1, 1 << 29])
def test_values_drawn_ahead_are_those_drawn_one_by_one(
    threads: int, grouping: bool, factor_init: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(init, "_MOST_ELEMENTS", most)
    config = toy.toy_config("float32", model={"factor_init": factor_init, "layers": 3}, parallel={"grouping": grouping})
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        decoder, _ = toy.toy_decoder(config)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    due = {p.name: initial_value(p, config.model, 0) for p in parameters(config.model)}
    assert all(torch.equal(value, due[name]) for name, value in toy.weights(decoder).items())


@pytest.mark.parametrize("gate", ["identity", "tensor", "dense"])
def test_gates_start_like_nn_linear_and_norms_as_identity(gate: str) -> None:
    _, weights = draws(family="lax", gate=gate)
    kinds = {"identity": set(), "tensor": {"gate_rows", "gate_columns"}, "dense": {"gate_weight", "gate_bias"}}[gate]
    assert {name.rpartition(".")[2] for name in weights if "gate_" in name} == kinds
    assert not any(name.startswith("layers.0.") for name in weights if "gate_" in name or "norm_" in name)
    for name, value in weights.items():
        kind = name.rpartition(".")[2]
        if kind in ("norm_weight", "attn_norm", "mlp_norm", "final_norm"):
            assert bool((value == 1).all()), name
        elif kind == "norm_bias":
            assert not value.any(), name
        elif kind.startswith("gate_"):
            fan_in = {"gate_rows": 4, "gate_columns": 8, "gate_weight": 32, "gate_bias": 32}[kind]  # 32 = 4 x 8
            assert value.shape[-1] == fan_in
            assert value.abs().max() <= fan_in**-0.5, name
    for kind in kinds:  # uniform up to the bound: the mean square is a third of its square
        gates = torch.cat([value.flatten() for name, value in weights.items() if name.endswith(kind)])
        bound = {"gate_rows": 4, "gate_columns": 8}.get(kind, 32) ** -0.5
        assert gates.square().mean().item() == pytest.approx(bound**2 / 3, rel=0.25)
        assert gates.abs().max() > 0.9 * bound


COLA = [("cola-60m", 42.77), ("cola-130m", 94.00), ("cola-350m", 185.22), ("cola-1b", 609.31), ("cola-7b", 2820.94)]
LLAMA = [("llama-60m", 58), ("llama-130m", 134), ("llama-350m", 368), ("llama-1b", 1339), ("llama-7b", 6738)]


@pytest.mark.parametrize(("preset", "millions"), COLA)
def test_parameter_counts_of_the_published_recipes(preset: str, millions: float) -> None:
    config = load(preset)
    assert config.parallel.world_size == 1
    assert config.model.ffn_dim == {"1b": 5461}.get(preset.partition("-")[2], config.model.ffn_dim)
    assert round(parameter_count(config.model) / 1e6, 2) == pytest.approx(millions, abs=0.011)


@pytest.mark.parametrize(("preset", "millions"), LLAMA)
def test_parameter_counts_of_the_full_rank_baselines(preset: str, millions: int) -> None:
    """Parameter counts from the literature (ReLoRA, GaLore, CoLA): 58M, 134M, 368M, 1339M, 6.7B."""
    assert round(parameter_count(load(preset).model) / 1e6) == millions


@pytest.mark.parametrize(("size", "billions"), [("8b", 8.03), ("70b", 70.55), ("405b", 405.85)])
def test_shapes_of_llama_3(size: str, billions: float) -> None:
    """Parameter counts from the model cards. The low-rank models have less than half of the linears' parameters."""
    dense, low_rank = load(f"llama3-{size}").model, load(f"cola-llama3-{size}").model
    assert parameter_count(dense) / 1e9 == pytest.approx(billions, abs=0.005)
    ends = 2 * dense.vocab_size * dense.dim
    assert (parameter_count(low_rank) - ends) / (parameter_count(dense) - ends) < 0.5
    assert not list(low_rank.advice())


def test_factors_larger_than_their_matrix_are_named() -> None:
    """The 8 key/value heads of Llama 3 8B are 1,024 wide, like the bottleneck."""
    wide = ["--model.ranks.attn.k", "1024", "--model.ranks.attn.v", "1024"]
    first, second = load("cola-llama3-8b", wide).model.advice()
    assert first.startswith("attn.k (4096 x 1024) has more parameters")
    assert second.startswith("attn.v ") and "--model.ranks.attn.v 256" in second
    assert not list(load("boost-7b").model.advice())


@pytest.mark.parametrize("size", ["60m", "130m", "350m", "1b", "7b"])
def test_a_baseline_uses_the_recipe_of_its_low_rank_model(size: str) -> None:
    low_rank, full = load(f"cola-{size}"), load(f"llama-{size}")
    shape = ("vocab_size", "dim", "ffn_dim", "layers", "heads", "kv_heads", "norm_eps", "rope_theta", "init_std")
    assert [getattr(full.model, field) for field in shape] == [getattr(low_rank.model, field) for field in shape]
    assert full.train == low_rank.train and full.data == low_rank.data
    assert full.model.family == "dense" and full.run.dir != low_rank.run.dir
