"""Every family matches its published function: logits, loss and gradients on one process equal those of hand-written
references."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from boost.config import Config
from boost.models.decoder import Decoder
from tests import references, toy
from tests.references import Reference, Shape, loss_and_gradients

LAX = {
    f"lax over {over}, {gate}": ({"family": "lax", "over": over, "gate": gate}, references.lax(over, gate))
    for over in ("svd", "cola")
    for gate in ("identity", "tensor", "dense")
}
FAMILIES: dict[str, tuple[dict[str, Any], Reference]] = {
    "dense": ({"family": "dense"}, references.dense),
    "dense, one head of keys": ({"family": "dense", "kv_heads": 1}, references.dense),
    "svd": ({"family": "svd", "kv_heads": 8}, references.svd),
    "cola": ({"family": "cola"}, references.cola),
    "cola, silu dropped": ({"family": "cola", "mlp_silu": False, "rank": 7}, references.cola),
    "cola, ranks": (
        {"family": "cola", "ranks": {"attn": 4, "mlp.down": 12, "layers.1.attn.q": 6, "layers.0.mlp.up": 10}},
        references.cola,
    ),
    "cola without its activation": ({"family": "cola", "latent_act": "none"}, references.svd),
    "dense, other parts": ({"family": "dense", "tied": True, "qk_norm": True, "attn_bias": "qkvo"}, references.dense),
    "cola, other parts": ({"family": "cola", "qk_norm": True, "attn_bias": "qkv", "head_dim": 6}, references.cola),
    **LAX,
    "lax, other parts": (
        {"family": "lax", "gate": "dense", "tied": True, "qk_norm": True, "attn_bias": "qkvo"},
        references.lax("cola", "dense"),
    ),
    "lax, ranks": (
        {"family": "lax", "gate": "tensor", "ranks": {"attn.q": 6, "attn.k": 5, "mlp": 12}},
        references.lax("cola", "tensor"),
    ),
    "lax, silu dropped": (
        {"family": "lax", "over": "cola", "mlp_silu": False, "gate": "dense"},
        references.lax("cola", "dense"),
    ),
}
GROUPINGS = [(name, True) for name in FAMILIES] + [(name, False) for name in ("dense", "cola, ranks", "lax, ranks")]


def make(name: str, grouping: bool = True) -> tuple[Config, Decoder, Reference]:
    """Three blocks, so latents are passed on twice. No vector is all ones or zeros, which would hide a missing one."""
    model, reference = FAMILIES[name]
    config = toy.toy_config(
        model={"layers": 3, "norm_eps": 1e-3, "rope_theta": 50.0, **model},
        parallel={"grouping": grouping},
        train={"seq_len": 8},
    )
    decoder, _ = toy.toy_decoder(config)
    generator = torch.Generator().manual_seed(7)
    for value in toy.weights(decoder).values():
        if value.dim() == 1:
            value += torch.rand(value.shape, generator=generator, dtype=value.dtype) - 0.3
    return config, decoder, reference


def shape_of(config: Config) -> Shape:
    model = config.model
    return Shape(model.heads, model.kv_heads, model.norm_eps, model.rope_theta, model.mlp_silu)


@pytest.mark.parametrize(("name", "grouping"), GROUPINGS, ids=str)
def test_logits_loss_and_gradients_are_those_of_the_reference(name: str, grouping: bool) -> None:
    config, decoder, reference = make(name, grouping)
    batch = toy.toy_tokens(config)
    weights = toy.weights(decoder)
    expected = reference(weights, shape_of(config), batch[0], None)
    for end in range(1, config.train.seq_len + 1):
        logits = decoder.next_logits(batch[0][:, :end], decoder.make_caches(2, end))
        torch.testing.assert_close(logits, expected[:, end - 1], rtol=1e-10, atol=1e-12)
    loss = decoder(*batch)
    loss.backward()
    expected_loss, gradients = loss_and_gradients(reference, weights, shape_of(config), *batch)
    torch.testing.assert_close(loss.detach(), expected_loss, rtol=1e-12, atol=0)
    assert toy.worst_error(toy.gradients(decoder), gradients) < 1e-11


@pytest.mark.parametrize("name", ["dense", "svd", "cola, ranks", "lax over cola, tensor", "lax over svd, dense"])
def test_documents_do_not_see_each_other_when_asked(name: str) -> None:
    config, decoder, reference = make(name)
    batch = toy.toy_tokens(config)
    ids = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2], [0, 0, 0, 0, 0, 0, 1, 1]])
    loss = decoder(*batch, ids)
    loss.backward()
    expected_loss, gradients = loss_and_gradients(reference, toy.weights(decoder), shape_of(config), *batch, ids)
    torch.testing.assert_close(loss.detach(), expected_loss, rtol=1e-12, atol=0)
    assert toy.worst_error(toy.gradients(decoder), gradients) < 1e-11
    whole, _ = loss_and_gradients(reference, toy.weights(decoder), shape_of(config), *batch)
    assert abs(whole - expected_loss) > 1e-3, "without ids all tokens of the sequence are seen"


def test_references_of_plugins_families_reduce_to_others() -> None:
    """Those that no built-in family checks: with certain weights, each computes what a known one does."""
    config, decoder, cola = make("cola")
    shape, (tokens, _) = shape_of(config), toy.toy_tokens(config)
    w, generator = toy.weights(decoder), torch.Generator().manual_seed(3)
    named = {name.removesuffix(".A"): value for name, value in w.items() if name.endswith(".A")}
    linears = {name: (w[f"{name}.B"].shape[0], a.shape[1]) for name, a in named.items()}
    index = {name: torch.randperm(d_in, generator=generator) for name, (_, d_in) in linears.items()}
    s = {name: torch.randn(size, generator=generator, dtype=torch.float64) for name, size in linears.items()}
    w |= {f"{name}.G": a for name, a in named.items()}
    w |= {f"{name}.index": columns for name, columns in index.items()}
    w |= {f"{name}.S": value for name, value in s.items()}
    w |= {f"{name}.beta": torch.zeros(1) for name in linears}
    whole = {f"{name}.W": value[:, index[name].argsort()] for name, value in s.items()}
    twice = {name: 2 * value for name, value in whole.items()}
    products = {f"{name}.W": w[f"{name}.B"] @ a for name, a in named.items() if not name.startswith("layers.0.")}
    for (reference, weights), (known, known_weights) in (
        ((references.bottleneck(lambda u: u), w), (references.svd, w)),
        ((references.gated, w), (references.bottleneck(lambda u: u * u * u.sigmoid()), w)),
        ((references.lost(1.0, 0.0, F.silu), w), (cola, w)),
        ((references.lost(0.5, 2.0, torch.zeros_like), w), (references.dense, w | twice)),
        ((references.cr_net, w | whole), (references.dense, w | whole | products)),
    ):
        expected = known(known_weights, shape, tokens, None)
        torch.testing.assert_close(reference(weights, shape, tokens, None), expected, rtol=1e-11, atol=1e-12)
