"""Initial weights are a function of seed and name, with the published spreads."""

import math

import pytest
import torch

from boost.config.architecture import parameter_count, parameters
from boost.config.load import load
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


@pytest.mark.parametrize("family", ["cola", "svd", "dense"])
def test_spread_of_each_factor(family: str) -> None:
    config = toy.toy_config(
        model={"family": family, "dim": 128, "ffn_dim": 352} | ({} if family == "dense" else {"rank": 32})
    )
    for p in parameters(config.model):
        value = initial_value(p, config.model, 0)
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


@pytest.mark.parametrize(
    ("preset", "millions"),
    [("cola-60m", 42.77), ("cola-130m", 94.00), ("cola-350m", 185.22), ("cola-1b", 609.31), ("cola-7b", 2820.94)],
)
def test_parameter_counts_of_the_published_recipes(preset: str, millions: float) -> None:
    assert round(parameter_count(load(preset).model) / 1e6, 2) == pytest.approx(millions, abs=0.011)
