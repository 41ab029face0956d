"""Targets, caches and gradients of the decoder. Tests of the families' math are in tests/models/test_families.py."""

from typing import Any

import pytest
import torch

from tests import toy

CASES = [
    {"family": "dense"},
    {"family": "dense", "kv_heads": 1},
    {"family": "svd"},
    {"family": "cola"},
    {"family": "cola", "mlp_silu": False, "rank": 7},
    {"family": "cola", "latent_act": "none"},
    {"family": "lax", "gate": "tensor"},
]


def test_targets_of_minus_100_do_not_count() -> None:
    config = toy.toy_config()
    decoder, _ = toy.toy_decoder(config)
    tokens, targets = toy.toy_tokens(config)
    parts = []
    for keep in (slice(0, 5), slice(5, 16)):
        masked = torch.full_like(targets, -100)
        masked[:, keep] = targets[:, keep]
        parts.append(decoder(tokens, masked))
    torch.testing.assert_close(sum(parts), decoder(tokens, targets), rtol=1e-12, atol=0)


@pytest.mark.parametrize("model", CASES, ids=str)
def test_cache_gives_the_logits_of_the_whole_sequence(model: dict[str, Any]) -> None:
    config = toy.toy_config(model=model)
    decoder, _ = toy.toy_decoder(config)
    tokens, _ = toy.toy_tokens(config)
    caches = decoder.make_caches(2, 16)
    decoder.next_logits(tokens[:, :5], caches)
    for end in range(6, 17):
        step = decoder.next_logits(tokens[:, end - 1 : end], caches)
        whole = decoder.next_logits(tokens[:, :end], decoder.make_caches(2, end))
        torch.testing.assert_close(step, whole, rtol=1e-10, atol=1e-12)


def test_gradients_are_those_of_finite_differences() -> None:
    config = toy.toy_config(model={"family": "cola"}, train={"seq_len": 5})
    decoder, _ = toy.toy_decoder(config)
    tokens, targets = toy.toy_tokens(config)
    decoder(tokens, targets).backward()
    grads, values = toy.gradients(decoder), toy.weights(decoder)
    for name, value in values.items():
        at = int(grads[name].abs().argmax())
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), value.shape))
        differences = []
        for sign in (1, -1):
            value[index] += sign * 1e-6
            differences.append(decoder(tokens, targets).item())
            value[index] -= sign * 1e-6
        assert (differences[0] - differences[1]) / 2e-6 == pytest.approx(grads[name][index].item(), rel=1e-5), name
