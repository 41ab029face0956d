"""Key/value caches: a sequence has the logits that it has without a cache."""

from typing import Any

import pytest
import torch

from tests import toy

CASES = [
    {"family": "dense", "kv_heads": 1},
    {"family": "svd", "kv_heads": 8},
    {"family": "cola"},
    {"family": "lax", "gate": "tensor"},
    {"family": "cola", "attn_bias": "qkvo"},
]


@pytest.mark.parametrize("model", CASES, ids=str)
def test_tokens_have_the_logits_of_the_whole_sequence(model: dict[str, Any]) -> None:
    """Two sequences: five tokens at once, then three one by one."""
    decoder, _ = toy.toy_decoder(toy.toy_config(model={"init_std": 0.5, **model}))
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]])
    caches = decoder.make_caches(2, 8)
    for end in (5, 6, 7, 8):
        begin = caches[0].length
        actual = decoder.next_logits(tokens[:, begin:end], caches)
        expected = decoder.logits_of(tokens, torch.tensor([end - 1, 8 + end - 1]))
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def test_bytes_are_those_of_the_tensors() -> None:
    decoder, _ = toy.toy_decoder(toy.toy_config("float32", model={"kv_heads": 2, "layers": 3}))
    caches = decoder.make_caches(5, 7)
    held = sum(x.numel() * x.element_size() for cache in caches for x in (cache.keys, cache.values))
    assert decoder.cache_bytes(5, 7) == held == 2 * 3 * 5 * 2 * 7 * 4 * 4
