"""Key/value caches of sequences of different lengths: every one has the logits that it has alone."""

from typing import Any

import pytest
import torch

from boost.models.attention import NextTokenRows, PromptRows
from boost.models.decoder import Decoder
from boost.train.generate import PackedWeight, prepare_inference
from tests import toy

CASES = [
    {"family": "dense", "kv_heads": 1},
    {"family": "svd", "kv_heads": 8},
    {"family": "cola"},
    {"family": "lax", "gate": "tensor"},
]
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5]]
MORE = [[5, 8, 9], [7, 9, 3], [2, 3, 8]]
"""Tokens that follow each prompt."""


def alone(decoder: Decoder, tokens: list[int]) -> torch.Tensor:
    """Logits [V] of the token after `tokens`."""
    logits: torch.Tensor = decoder.next_logits(torch.tensor([tokens]), decoder.make_caches(1, len(tokens)))[0]
    return logits


@pytest.mark.parametrize("model", CASES, ids=str)
def test_rows_of_different_lengths_have_the_logits_that_they_have_alone(model: dict[str, Any]) -> None:
    decoder, _ = toy.toy_decoder(toy.toy_config(model={"init_std": 0.5, **model}))
    caches = decoder.make_caches(3, 8)
    assert not any(x.any() for cache in caches for x in (cache.keys, cache.values)), "nan would get into every sum"
    order = [2, 0, 1]  # prompts need not stand in the order of their rows
    packed = torch.tensor([[token for row in order for token in PROMPTS[row]]])
    rows = PromptRows(tuple(order), tuple(len(PROMPTS[row]) for row in order))
    found = decoder.next_logits(packed, caches, rows=rows)
    for logits, row in zip(found, order, strict=True):
        torch.testing.assert_close(logits, alone(decoder, PROMPTS[row]), rtol=1e-10, atol=1e-12)
    for cache in caches:  # what lies behind the end of a row, such as of a longer text before, must not matter
        for row, prompt in enumerate(PROMPTS):
            cache.keys[row, :, len(prompt) :] = 1e3
            cache.values[row, :, len(prompt) :] = 1e3
    texts = [list(prompt) for prompt in PROMPTS]
    for step in range(3):
        lengths = [len(text) for text in texts]
        for text, more in zip(texts, MORE, strict=True):
            text.append(more[step])
        found = decoder.next_logits(
            torch.tensor([[text[-1]] for text in texts]),
            caches,
            rows=NextTokenRows.of(lengths, torch.device("cpu"), torch.float64),
        )
        for logits, text in zip(found, texts, strict=True):
            torch.testing.assert_close(logits, alone(decoder, text), rtol=1e-10, atol=1e-12)


def test_a_copied_row_continues_as_its_source() -> None:
    decoder, _ = toy.toy_decoder(toy.toy_config())
    caches = decoder.make_caches(2, 8)
    decoder.next_logits(torch.tensor([PROMPTS[0]]), caches, rows=PromptRows((1,), (5,)))
    for cache in caches:
        cache.copy(1, 0, 5)
    rows = NextTokenRows.of([5, 5], torch.device("cpu"), torch.float64)
    assert rows.mask_B11C is None, "rows of one length need no mask"
    logits = decoder.next_logits(torch.tensor([[7], [7]]), caches, rows=rows)
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=0)
    torch.testing.assert_close(logits[0], alone(decoder, [*PROMPTS[0], 7]), rtol=1e-10, atol=1e-12)


def test_bytes_are_those_of_the_tensors() -> None:
    decoder, _ = toy.toy_decoder(toy.toy_config("float32", model={"kv_heads": 2, "layers": 3}))
    caches = decoder.make_caches(5, 7)
    held = sum(x.numel() * x.element_size() for cache in caches for x in (cache.keys, cache.values))
    assert decoder.cache_bytes(5, 7) == held == 2 * 3 * 5 * 2 * 7 * 4 * 4


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    "model",
    [
        *CASES,
        {"family": "lax", "gate": "dense"},
        {"family": "cola", "kv_heads": 8},
        {"family": "cola", "attn_bias": "qkvo"},
        {"family": "dense", "attn_bias": "qkvo"},
    ],
    ids=str,
)
def test_weights_prepared_for_inference_are_the_same_function(model: dict[str, Any], batch: int) -> None:
    tokens, _ = toy.toy_tokens(toy.toy_config())
    for dtype, tolerance in (("float64", 0.0), ("float32", 1e-5), ("bfloat16", 3e-2)):
        decoder, _ = toy.toy_decoder(toy.toy_config(dtype, model={"init_std": 0.5, **model}))
        for parameter in decoder.parameters():
            if parameter.ndim == 1:  # biases are 0 at first
                parameter.data += torch.linspace(-0.1, 0.1, parameter.numel())
        logits = []
        for prepares in (False, True):
            if prepares:
                prepare_inference(decoder, batch)
            caches = decoder.make_caches(2, 17)
            logits.append(decoder.next_logits(tokens, caches))
            logits.append(decoder.next_logits(tokens[:, :1], caches))
        prefilled, decoded, *prepared = logits
        for before, after in zip((prefilled, decoded), prepared, strict=True):
            assert (before - after).abs().max() <= tolerance * before.abs().max()
        down: Any = decoder.blocks[0].down
        kept = down.A if model["family"] == "dense" else down.weights()[0]
        if not PackedWeight.is_supported(decoder.device, decoder.compute_dtype):
            assert not isinstance(kept, PackedWeight)  # such as bf16 on a CPU without its instructions
        elif dtype == "bfloat16" or batch > 1:
            assert isinstance(kept, PackedWeight)
            assert not any(list(block.down.parameters(recurse=False)) for block in decoder.blocks)
        elif model["family"] != "dense":
            assert kept.stride() == (1, kept.shape[0])
        norms = {p.dtype for p in decoder.parameters() if p.ndim == 1 and p.numel()}
        assert norms == {torch.float64 if dtype == "float64" else torch.float32}
