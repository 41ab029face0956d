"""Contenders are interleaved; ratios are within a round; zeros and too few rounds are rejected."""

import math
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.commands import LEAST_ROUNDS
from benchmarks.experiments import contest
from benchmarks.experiments.contest import WARM_UP, ratio, refuse_zeros, spread, t_interval, take_turns
from benchmarks.experiments.results import MeasurementError
from boost.parallel.mesh import Mesh
from tests import toy
from tests.distributed import run_distributed

ONE = Mesh(toy.CPU)


def note(log: list[str], name: str) -> contest.Call:
    def call() -> list[Tensor]:
        log.append(name)
        return [torch.ones(1)]

    return call


def test_every_round_times_each_once_and_begins_with_another_one() -> None:
    log: list[str] = []
    turns = take_turns({name: note(log, name) for name in "abc"}, ONE, LEAST_ROUNDS)
    log = log[3 * WARM_UP :]
    rounds = [log[3 * i : 3 * i + 3] for i in range(LEAST_ROUNDS)]
    assert rounds[:4] == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"]]
    assert len(log) == 3 * LEAST_ROUNDS
    assert all(len(times) == LEAST_ROUNDS and min(times) > 0 for times in turns.seconds.values())
    assert len(turns.probe_s) == LEAST_ROUNDS and min(turns.probe_s) > 0


def test_one_warm_up_is_enough_for_contenders_that_have_run() -> None:
    log: list[str] = []
    take_turns({"a": note(log, "a")}, ONE, LEAST_ROUNDS, warm_up=1)
    assert len(log) == 1 + LEAST_ROUNDS
    with pytest.raises(MeasurementError, match="only zeros"):
        take_turns({"a": lambda: [torch.zeros(1)]}, ONE, LEAST_ROUNDS, warm_up=1)


def test_what_is_short_is_repeated_within_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    now, log = 0.0, []

    def call() -> list[Tensor]:
        nonlocal now
        now += 2**-12
        log.append("a")
        return [torch.ones(1)]

    monkeypatch.setattr(contest, "time", SimpleNamespace(perf_counter=lambda: now))
    turns = take_turns({"a": call}, ONE, LEAST_ROUNDS, least_s=2**-9)
    assert turns.repeats["a"] == 8
    assert len(log) == WARM_UP + LEAST_ROUNDS * 8
    assert turns.seconds["a"] == [2**-12] * LEAST_ROUNDS  # of one repetition


def two_processes() -> tuple[dict[str, int], float]:
    mesh = toy.mesh(tp=2)

    def call() -> list[Tensor]:
        time.sleep(0.05 * mesh.rank)
        return [torch.ones(1)]

    turns = take_turns({"a": call}, mesh, LEAST_ROUNDS, least_s=0.1)
    return turns.repeats, max(turns.seconds["a"])


def test_the_slowest_process_counts_and_all_repeat_equally_often() -> None:
    (repeats, seconds), (theirs, _) = run_distributed(2, two_processes)
    assert repeats == theirs
    # Process 0 does nothing, and waits for process 1. It may see less than the whole wait where the system lets it look at
    # the clock late: not in every round, and not by half.
    assert seconds >= 0.025


@pytest.mark.parametrize(
    ("computed", "said"),
    [
        ([torch.ones(2), torch.zeros(2)], "only zeros"),
        ([torch.tensor([1.0, torch.nan])], "non-finite"),
        ([], "returned no results"),
    ],
)
def test_a_time_of_nothing_is_refused(computed: list[Tensor], said: str) -> None:
    with pytest.raises(MeasurementError, match=f"mine .*{said}"):
        take_turns({"mine": lambda: computed}, ONE, LEAST_ROUNDS)
    refuse_zeros("mine", [torch.tensor([0.0, 1.0])])


def test_a_ratio_is_of_the_same_round() -> None:
    """The machine is ten times slower in half of the rounds, which does not affect the ratio."""
    slow = np.array([1.0, 10.0, 1.0, 10.0, 1.0, 10.0, 1.0])
    found = ratio(2 * slow, slow)
    assert (found.value, found.low, found.high) == (2, 2, 2)
    with pytest.raises(ValueError, match="same rounds"):
        ratio([1.0] * 7, [1.0] * 8)


def test_launches_that_differ_widen_the_interval() -> None:
    """Rounds agree within a launch, launches differ: as 75 independent rounds, the interval would be far too narrow."""
    rng = np.random.default_rng(2)
    factors = [1.2, 1.25, 1.3, 1.35, 1.4]
    under = [list(rng.lognormal(0, 0.1, 15)) for _ in factors]
    over = [[f * each * rng.lognormal(0, 0.01) for each in one] for f, one in zip(factors, under, strict=True)]
    found, flat = ratio(over, under), ratio(contest.pooled(over), contest.pooled(under))
    assert found.value == flat.value == pytest.approx(1.3, abs=0.01)
    assert found.low < 1.26 and found.high > 1.34
    assert found.high - found.low > 1.3 * (flat.high - flat.low)
    assert spread(over) == spread(contest.pooled(over))
    quartiles = spread([5.0, 1.0, 3.0, 2.0, 4.0])
    assert (quartiles.low, quartiles.median, quartiles.high, quartiles.rounds) == (2, 3, 4, 5)


def test_the_interval_follows_a_skewed_statistic() -> None:
    """BCa against scipy's, which knows only one level: the same rounds as one launch."""
    stats = pytest.importorskip("scipy.stats")
    data = np.random.default_rng(4).exponential(1.0, 30)
    found = contest.bootstrap(lambda each: np.mean(each, axis=-1), data.tolist())
    theirs = stats.bootstrap((data,), np.mean, n_resamples=contest.RESAMPLES, method="BCa", rng=0).confidence_interval
    assert (found.low, found.high) == pytest.approx((theirs.low, theirs.high), abs=0.02)
    assert found.high - found.value > 1.2 * (found.value - found.low), "the longer tail is on the right"


def test_too_few_rounds_and_launches_of_other_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="needs at least 7"):
        take_turns({"a": note([], "a")}, ONE, LEAST_ROUNDS - 1)
    with pytest.raises(ValueError, match="launches of 7, 6 rounds"):
        ratio([[1.0] * 7, [1.0] * 6], [[1.0] * 7, [1.0] * 6])
    with pytest.raises(ValueError, match="14 over 7 rounds"):
        ratio([[1.0] * 7, [1.0] * 7], [1.0] * 7)


@pytest.mark.filterwarnings("error")
def test_a_statistic_may_be_infinite_without_one_launch() -> None:
    """As memory saved per added time is, if nothing was added: the interval is then not corrected for skewness."""

    def per_time(added: np.ndarray) -> np.ndarray:
        time = np.maximum(np.mean(added, axis=-1) - 0.5, 0)
        return np.divide(1.0, time, out=np.full_like(time, np.inf), where=time > 0)

    found = contest.bootstrap(per_time, [[1.0] * 7, [1.0] * 7, [0.0] * 7])
    assert (found.low, found.value, found.high) == (2.0, pytest.approx(6.0), np.inf)


def test_the_lower_end_decides_a_goal() -> None:
    goal = contest.at_least("what", 1.5, "here", contest.Ratio(1.6, 1.4, 1.7), " (btp)")
    assert (goal.figure, goal.found, goal.met) == (">= 1.5x", "1.60 (1.40 to 1.70) x (btp)", False)


def test_five_numbers() -> None:
    mean, low, high = t_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    half = 2.776445 * math.sqrt(2.5) / math.sqrt(5)
    assert (mean, low, high) == pytest.approx((3.0, 3.0 - half, 3.0 + half), rel=1e-6)
