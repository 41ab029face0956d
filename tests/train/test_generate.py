"""How the next token is chosen, and that generation follows the model."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from boost.errors import ConfigError
from boost.train.generate import Sampling, choose, distribution, generate
from tests import toy

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0]])


def test_temperature_scales_logits() -> None:
    torch.testing.assert_close(distribution(LOGITS, Sampling(0.5)), (LOGITS / 0.5).softmax(-1))


def test_top_k_keeps_the_k_likeliest() -> None:
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
    assert choose(LOGITS, Sampling(0.0), generator).item() == 0
    draws = [
        [int(choose(LOGITS, Sampling(1.0), torch.Generator().manual_seed(s))) for s in range(200)] for _ in range(2)
    ]
    assert draws[0] == draws[1]
    assert draws[0].count(0) / 200 == pytest.approx(LOGITS.softmax(-1)[0, 0].item(), abs=0.1)


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
    assert list(generate(decoder, prompt, 8, Sampling(0.0), eos=new[0])) == new[:1]
