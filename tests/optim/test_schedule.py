"""Learning-rate schedules at the steps that matter."""

import itertools
import math

import pytest

from boost.config import load
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


def test_restarts_have_the_rates_of_the_published_log() -> None:
    """logs/LORO_130m.log of repository mzf666/LORO-main: learning rates at iterations 19938, 20000 and 20001 (1-based)."""
    config = load("loro-130m")
    published = {19937: 0.001288561673898701, 19999: 0.0012716518928599786, 20000: 1e-08}
    for step, rate in published.items():
        assert learning_rate(config.optim, step, config.train.steps) == pytest.approx(rate, rel=1e-12)


def test_rates_dip_after_every_exact_step_except_at_the_end_of_warmup() -> None:
    optim = {"name": "loro", "schedule": "cosine-restarts", "exact_every": 20, "warmup_steps": 40, "restart_delay": 40}
    r = rates(400, **optim)
    top = 0.5 * (1 + math.cos(math.pi * 40 / 360))
    assert r[0] == pytest.approx(0.1) and r[19] == pytest.approx(0.1 + (top - 0.1) * 19 / 40)
    assert r[20:25] == pytest.approx([1e-6 + (0.1 + (top - 0.1) / 2 - 1e-6) * k / 5 for k in range(5)])
    assert r[25] == pytest.approx(0.1 + (top - 0.1) * 25 / 40)
    assert [step for step in range(400) if r[step] < 1e-5] == [20, *range(60, 400, 20)]
    assert max(range(400), key=r.__getitem__) in (79, 81), "the top of the cosine, at 80, is under a dip"
    assert all(a > b for start in range(85, 400, 20) for a, b in itertools.pairwise(r[start : min(start + 15, 400)]))


def test_shortest_runs_have_a_rate() -> None:
    assert rates(1) == pytest.approx([0.1])
    assert rates(2, warmup_steps=2) == pytest.approx([0.5, 1.0])
    assert rates(1, schedule="constant") == [1.0]
