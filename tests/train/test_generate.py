"""How the next token is chosen, that generation follows the model, and that texts are independent."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from boost.errors import ConfigError
from boost.train import generate as module
from boost.train.generate import choose, distribution, generate
from boost.train.sampling import Sampling
from tests import toy
from tests.distributed import run_distributed

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0]])


def test_temperature_scales_logits_and_top_k_keeps_the_k_likeliest() -> None:
    torch.testing.assert_close(distribution(LOGITS, Sampling(0.5)), (LOGITS / 0.5).softmax(-1))
    p = distribution(LOGITS, Sampling(1.0, top_k=2))
    torch.testing.assert_close(p, torch.tensor([[2.0, 1.0, float("-inf"), float("-inf")]]).softmax(-1))
    torch.testing.assert_close(distribution(LOGITS, Sampling(1.0, top_k=9)), LOGITS.softmax(-1))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-8, 8), min_size=2, max_size=12), st.floats(0.01, 0.999))
def test_top_p_is_the_smallest_set_that_holds_p(logits: list[float], p: float) -> None:
    whole = torch.tensor([logits]).softmax(-1)
    kept = distribution(torch.tensor([logits]), Sampling(1.0, top_p=p))
    chosen = kept[0] > 0
    mass = whole[0][chosen].sum()
    assert chosen.any()
    assert mass >= p - 1e-5
    assert mass - whole[0][chosen].min() < p + 1e-5, "without its least likely token it would not hold p"
    torch.testing.assert_close(kept[0][chosen], whole[0][chosen] / mass)


def test_greedy_takes_the_likeliest_and_seeds_repeat() -> None:
    assert choose(LOGITS, Sampling(0.0), torch.Generator()) == 0
    draws = [[choose(LOGITS, Sampling(1.0), torch.Generator().manual_seed(s)) for s in range(200)] for _ in range(2)]
    assert draws[0] == draws[1]
    assert draws[0].count(0) / 200 == pytest.approx(LOGITS.softmax(-1)[0, 0].item(), abs=0.1)


def test_parameters_that_are_not_given_are_those_of_the_folder_if_it_samples() -> None:
    theirs = {"do_sample": True, "top_k": 20, "top_p": None, "repetition_penalty": 1.1}
    assert Sampling.of({"do_sample": True}, None, None, None, 0) == Sampling(1.0, 50, 1.0), "as in transformers"
    assert Sampling.of(theirs, None, None, None, 3) == Sampling(1.0, 20, 1.0, 3)
    assert Sampling.of(theirs | {"temperature": 0.6}, None, 5, 0.5, 0) == Sampling(0.6, 5, 0.5)
    for name, value in (("top_k", float("inf")), ("top_k", -1), ("top_p", 1.5), ("temperature", "1")):
        invalid = theirs | {name: value}
        with pytest.raises(ConfigError, match=f"^{name} = .* in the imported generation_config.json is not valid"):
            Sampling.of(invalid, None, None, None, 0)
        Sampling.of(invalid, 1.0, 5, 1.0, 0).check()
    for other in ({}, theirs | {"do_sample": False}):
        assert Sampling.of(other, None, None, None, 0) == Sampling(0.8, 0, 0.95)


@pytest.mark.parametrize(
    "sampling", [Sampling(-1.0), Sampling(1.0, top_k=-1), Sampling(1.0, top_p=1.5), Sampling(1.0, top_p=0.0)]
)
def test_impossible_sampling_is_refused(sampling: Sampling) -> None:
    with pytest.raises(ConfigError):
        sampling.check()


def test_greedy_generation_is_the_models_own_argmax_and_stops_at_the_end() -> None:
    config = toy.toy_config("float32")
    decoder, _ = toy.toy_decoder(config)
    prompt = [3, 1, 4, 1, 5]
    expected = list(prompt)
    for _ in range(8):
        logits = decoder.next_logits(torch.tensor([expected]), decoder.make_caches(1, len(expected)))
        expected.append(int(logits.argmax()))
    new = list(generate(decoder, prompt, 8, Sampling(0.0)))
    assert new == expected[5:]
    assert list(generate(decoder, prompt, 8, Sampling(0.0), [new[0]])) == new[:1]


PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5], [3, 5, 8, 9, 7, 9, 3], [2, 3]]
MODEL = {"model": {"family": "cola", "init_std": 0.5, "kv_heads": 4}}
"""A model whose greedy text does not repeat itself."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_bias_of_every_linear_of_attention(dtype: str) -> None:
    decoder, _ = toy.toy_decoder(toy.toy_config(dtype, model={"attn_bias": "qkvo"}))
    assert [len(list(generate(decoder, prompt, 4, Sampling(0.0)))) for prompt in PROMPTS[:2]] == [4, 4]


def test_every_text_has_random_numbers_of_its_own() -> None:
    decoder, _ = toy.toy_decoder(toy.toy_config(**MODEL))
    sampling, drawn = Sampling(1.0, top_p=0.9, seed=5), set[tuple[int, ...]]()
    for prompt in PROMPTS:
        texts = [tuple(generate(decoder, prompt, 6, sampling, sample=sample)) for sample in range(3)]
        assert texts[0] == tuple(generate(decoder, prompt, 6, sampling))
        drawn |= {*texts}
    assert len(drawn) == 3 * len(PROMPTS)


def test_draws_of_different_prompts_are_independent() -> None:
    """Of 63 prompts with almost the same logits, and of one prompt 63 times, the first tokens differ like independent draws."""
    decoder, _ = toy.toy_decoder(toy.toy_config())
    for texts in ([([token], 0) for token in range(63)], [([3], sample) for sample in range(63)]):
        drawn = {next(generate(decoder, prompt, 1, Sampling(1.0), sample=sample)) for prompt, sample in texts}
        assert len(drawn) > 30, "of 64 equally likely tokens, 40 on average"


def test_a_cache_that_does_not_fit_is_refused_with_its_size_before_it_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder, _ = toy.toy_decoder(toy.toy_config(**MODEL))
    available = decoder.cache_bytes(1, 106) - 1
    monkeypatch.setattr(module, "available_memory", lambda device: available)
    monkeypatch.setattr(decoder, "make_caches", lambda *_: pytest.fail("allocated"))
    said = r"cache of 106 tokens takes .* kB, but .*; at most 105 tokens fit, including the prompt; reduce --max-tokens"
    with pytest.raises(ConfigError, match=said):
        next(generate(decoder, [3] * 7, 100, Sampling(0.0)))


@pytest.mark.parametrize("parallel", [{"tp": 2}, {"tp": 2, "layout": "btp-sp"}, {"pp": 2}], ids=str)
def test_texts_on_a_mesh(parallel: dict[str, Any]) -> None:
    expected = texts_on({})
    assert run_distributed(2, texts_on, parallel) == [expected] * 2


def texts_on(parallel: dict[str, Any]) -> list[list[int]]:
    model, _ = toy.toy_model(toy.toy_config(**MODEL, parallel=parallel))
    return [list(generate(model, prompt, 8, Sampling(0.0), [9])) for prompt in PROMPTS]
