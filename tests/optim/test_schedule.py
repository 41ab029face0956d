"""Schedules at the steps that matter."""

import itertools

import pytest

from boost.config.schema import OptimConfig
from boost.optim.schedule import learning_rate


def rates(steps: int, **fields: object) -> list[float]:
    optim = OptimConfig.model_validate({"lr": 1.0, "min_lr_ratio": 0.1, **fields})
    return [learning_rate(optim, step, steps) for step in range(steps)]


def test_cosine_warms_up_peaks_once_and_ends_at_the_minimum() -> None:
    r = rates(101, warmup_steps=10)
    assert r[:10] == pytest.approx([0.1 * k for k in range(1, 11)])
    assert r[10] == pytest.approx(1.0)
    assert r[55] == pytest.approx(0.55)
    assert r[100] == pytest.approx(0.1)
    assert all(a >= b for a, b in itertools.pairwise(r[10:]))


def test_constant_stays_until_its_linear_decay() -> None:
    r = rates(100, schedule="constant", warmup_steps=5, decay_steps=20)
    assert r[5:80] == pytest.approx([1.0] * 75)
    assert r[99] == pytest.approx(0.1)
    assert r[89] == pytest.approx(0.55)


def test_shortest_runs_have_a_rate() -> None:
    assert rates(1) == pytest.approx([0.1])
    assert rates(2, warmup_steps=2) == pytest.approx([0.5, 1.0])
    assert rates(1, schedule="constant") == [1.0]
