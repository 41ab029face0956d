"""Every family matches its published function: logits, loss and gradients on one process equal those of hand-written
references."""

from typing import Any

import pytest
import torch
from torch import Tensor

from boost.config import Config
from boost.models.decoder import Decoder
from tests import references, toy
from tests.references import Reference, Shape

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
    **LAX,
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


def loss_and_gradients(
    reference: Reference, weights: dict[str, Tensor], config: Config, batch: tuple[Tensor, Tensor], ids: Tensor | None
) -> tuple[Tensor, dict[str, Tensor]]:
    leaves = {name: value.clone().requires_grad_() for name, value in weights.items()}
    logits = reference(leaves, shape_of(config), batch[0], ids)
    loss = -logits.log_softmax(-1).gather(-1, batch[1][..., None]).sum()
    loss.backward()
    return loss.detach(), {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


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
    expected_loss, gradients = loss_and_gradients(reference, weights, config, batch, None)
    torch.testing.assert_close(loss.detach(), expected_loss, rtol=1e-12, atol=0)
    assert toy.worst_error(toy.gradients(decoder), gradients) < 1e-9


@pytest.mark.parametrize("name", ["dense", "svd", "cola, ranks", "lax over cola, tensor", "lax over svd, dense"])
def test_documents_do_not_see_each_other_when_asked(name: str) -> None:
    config, decoder, reference = make(name)
    batch = toy.toy_tokens(config)
    ids = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2], [0, 0, 0, 0, 0, 0, 1, 1]])
    loss = decoder(*batch, ids)
    loss.backward()
    expected_loss, gradients = loss_and_gradients(reference, toy.weights(decoder), config, batch, ids)
    torch.testing.assert_close(loss.detach(), expected_loss, rtol=1e-12, atol=0)
    assert toy.worst_error(toy.gradients(decoder), gradients) < 1e-9
    whole, _ = loss_and_gradients(reference, toy.weights(decoder), config, batch, None)
    assert abs(whole - expected_loss) > 1e-3, "without ids all tokens of the sequence are seen"
