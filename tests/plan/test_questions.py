"""The reported maximum fits, and one step more does not."""

from dataclasses import replace

import pytest

from boost.config.schema import Config
from boost.plan.candidates import Request, every_candidate, legal
from boost.plan.questions import (
    SEQUENCE_STEP,
    fits,
    fits_at_all,
    largest_batch,
    largest_model,
    longest_sequence,
    max_layers,
    where_it_fits,
)
from boost.plan.search import Search, max_peak
from tests.plan.toys import base, hardware

USABLE = 2e8


def request(*overrides: str, gpus: int = 2, usable: float = USABLE) -> Request:
    return Request(base(*overrides), gpus, hardware(usable), frozenset({"parallel.pp"}))


def longer(config: Config, **changes: int) -> int:
    train = config.train.model_copy(update=changes)
    asked = config.model_copy(update={"train": train})
    assert legal(asked)
    return max_peak(asked, hardware().is_gpu)[0].total


def test_longest_sequence() -> None:
    asked = request()
    answers = {answer.policy: answer for answer in longest_sequence(asked)}
    assert answers["none"].amount < answers["low-rank"].amount < answers["full-block"].amount
    for answer in answers.values():
        assert answer.plan is not None and answer.amount % SEQUENCE_STEP == 0
        config = answer.plan.config
        assert config.train.seq_len == answer.amount and config.train.recompute == answer.policy
        assert answer.plan.memory <= USABLE < longer(config, seq_len=answer.amount + SEQUENCE_STEP)


@pytest.mark.slow
def test_largest_batch() -> None:
    (answer,) = (each for each in largest_batch(request()) if each.policy == "low-rank")
    assert answer.plan is not None
    config, n = answer.plan.config, answer.amount
    assert config.train.micro_batch == n > 1
    more = longer(config, micro_batch=n + 1, global_batch=2 * (n + 1) * config.parallel.dp * config.parallel.pp)
    assert answer.plan.memory <= USABLE < more


def test_most_layers_and_largest_model() -> None:
    asked = replace(request(gpus=1, usable=1e8), fixed=frozenset({"train.recompute"}))
    (answer,) = max_layers(asked)
    assert answer.plan is not None and answer.plan.config.model.layers == answer.amount > 4
    shapes = [
        (str(n), asked.base.model.model_copy(update={"layers": n})) for n in (2, answer.amount, answer.amount + 1)
    ]
    found = largest_model(asked, shapes)
    assert found is not None and found[0] == str(answer.amount)
    assert largest_model(replace(asked, hardware=hardware(1e6)), shapes) is None


def test_nothing_fits() -> None:
    tight = request(usable=5e6)
    assert all(answer.plan is None and answer.amount == 0 for answer in largest_batch(tight))
    assert not fits_at_all(tight) and Search(tight).fastest() is None


@pytest.mark.parametrize("usable", [4.0e7, 8e7])
def test_suggested_sizes_fit(usable: float) -> None:
    asked = Request(base("--train.seq_len=8192", "--train.global_batch=8"), 1, hardware(usable))
    search = Search(asked)
    assert search.fastest() is None
    words = where_it_fits(search)
    if " GPUs (" in words:
        gpus = int(words.split()[1])
        assert fits(replace(asked, gpus=gpus)) and not fits(replace(asked, gpus=gpus // 2))
    if "--seq" in words:
        length = int(words.rsplit("--seq ", 1)[1].rstrip(")"))
        shorter = base(f"--train.seq_len={length}", "--train.global_batch=8")
        fitting = Search(Request(shorter, 1, hardware(usable))).fastest()
        assert fitting is not None
    assert words


@pytest.mark.slow
def test_smallest_configurations_are_candidates() -> None:
    asked = request()
    (answer,) = (each for each in largest_batch(asked) if each.policy == "full-block")
    assert answer.plan is not None
    meshes = {repr(each.parallel) for each in every_candidate(asked)}
    assert repr(answer.plan.config.parallel) in meshes
