"""How the next token is chosen, that generation follows the model, and that a batch changes no text."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from boost.errors import ConfigError
from boost.train import generate as module
from boost.train.generate import choose, distribution, generate, generate_batch
from boost.train.model import Model
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
    generator = torch.Generator().manual_seed(0)
    assert choose(LOGITS, Sampling(0.0), [generator]) == [0]
    draws = [
        choose(LOGITS.expand(200, -1), Sampling(1.0), [torch.Generator().manual_seed(s) for s in range(200)])
        for _ in range(2)
    ]
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


# Batches.

PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5], [3, 5, 8, 9, 7, 9, 3], [2, 3]]
MODEL = {"model": {"family": "cola", "init_std": 0.5, "kv_heads": 4}}
"""A model whose greedy text does not repeat itself."""


def collected(model: Model, max_tokens: int, *arguments: Any, **options: Any) -> dict[tuple[int, int], list[int]]:
    """Tokens by prompt and sample. Each text ends once, with its last token."""
    found: dict[tuple[int, int], list[int]] = {}
    ended = set()
    for new in generate_batch(model, PROMPTS, max_tokens, *arguments, **options):
        key = (new.prompt, new.sample)
        assert key not in ended
        found.setdefault(key, []).append(new.token)
        ended |= {key} if new.is_last else set()
    assert ended == set(found)
    return found


@pytest.mark.parametrize("batch", [1, 2, 3, 16])
def test_greedy_text_of_a_batch_is_that_of_each_prompt_alone(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PREFILL_TOKENS", 6)
    decoder, _ = toy.toy_decoder(toy.toy_config(**MODEL))
    alone = [list(generate(decoder, prompt, 12, Sampling(0.0))) for prompt in PROMPTS]
    assert len({tuple(text) for text in alone}) == len(PROMPTS)
    assert len({token for text in alone for token in text}) > 8, "text that says one word would show little"
    assert list(collected(decoder, 12, Sampling(0.0), batch=batch).items()) == [
        ((n, 0), text) for n, text in enumerate(alone)
    ]
    # Ends at different steps, so that rows are freed and taken again.
    ends = [alone[0][2], alone[1][6], alone[3][0]]
    short = [list(generate(decoder, prompt, 12, Sampling(0.0), ends)) for prompt in PROMPTS]
    assert len({len(text) for text in short}) > 2
    assert all(token not in ends for text in short for token in text[:-1])
    assert collected(decoder, 12, Sampling(0.0), ends, batch=batch) == {(n, 0): text for n, text in enumerate(short)}


def test_every_text_has_random_numbers_of_its_own_however_it_is_batched() -> None:
    decoder, _ = toy.toy_decoder(toy.toy_config(**MODEL))
    sampling = Sampling(1.0, top_p=0.9, seed=5)
    found = collected(decoder, 6, sampling, samples=3, batch=1)
    assert found == collected(decoder, 6, sampling, samples=3, batch=4)
    assert len(found) == len({tuple(text) for text in found.values()}) == 3 * len(PROMPTS)
    for number, prompt in enumerate(PROMPTS):
        assert found[number, 0] == list(generate(decoder, prompt, 6, sampling))


def test_draws_of_different_prompts_are_independent() -> None:
    """Of 63 prompts with almost the same logits, and of one prompt 63 times, the first tokens differ like independent draws."""
    decoder, _ = toy.toy_decoder(toy.toy_config())
    for prompts in ([[token] for token in range(63)], [[3]] * 63):
        drawn = {new.token for new in generate_batch(decoder, prompts, 1, Sampling(1.0), batch=8)}
        assert len(drawn) > 30, "of 64 equally likely tokens, 40 on average"


def test_a_prompt_runs_once_for_all_its_samples_and_without_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, _ = toy.toy_decoder(toy.toy_config(**MODEL))
    runs: list[tuple[int, ...]] = []
    whole = decoder.next_logits
    monkeypatch.setattr(decoder, "next_logits", lambda t, *a, **k: (runs.append(tuple(t.shape)), whole(t, *a, **k))[1])
    collected(decoder, 3, Sampling(1.0), samples=2, batch=10)
    assert runs == [(1, sum(map(len, PROMPTS))), (10, 1), (10, 1)]
    runs.clear()
    monkeypatch.setattr(module, "PREFILL_TOKENS", 7)
    collected(decoder, 2, Sampling(0.0), batch=5)
    assert runs == [(1, 6), (1, 3), (1, 7), (1, 2), (5, 1)]


def test_a_cache_that_does_not_fit_is_refused_with_its_size_before_it_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder, _ = toy.toy_decoder(toy.toy_config(**MODEL))
    row = decoder.cache_bytes(1, 7 + 99)
    monkeypatch.setattr(module, "available_memory", lambda device: 4 * row - 1)
    monkeypatch.setattr(decoder, "make_caches", lambda *_: pytest.fail("allocated"))
    with pytest.raises(ConfigError, match=r"--batch = 5: .* 5 x 106 tokens takes .* kB, but .*; largest valid .*: 3$"):
        collected(decoder, 100, Sampling(0.0), batch=9)
    monkeypatch.setattr(module, "available_memory", lambda device: row - 1)
    with pytest.raises(ConfigError, match="at most 105 tokens fit, including the prompt; reduce --max-tokens"):
        collected(decoder, 100, Sampling(0.0), batch=1)


@pytest.mark.parametrize("parallel", [{"tp": 2}, {"tp": 2, "layout": "btp-sp"}, {"pp": 2}], ids=str)
def test_batches_on_a_mesh(parallel: dict[str, Any]) -> None:
    expected = texts_on({})
    assert run_distributed(2, texts_on, parallel) == [expected] * 2


def texts_on(parallel: dict[str, Any]) -> dict[tuple[int, int], list[int]]:
    model, _ = toy.toy_model(toy.toy_config(**MODEL, parallel=parallel))
    return collected(model, 8, Sampling(0.0), [9], batch=3)
