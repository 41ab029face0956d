"""Intervals of predicted steps, and the probability that a peak fits."""

import pytest

from boost.config.schema import ParallelConfig
from boost.plan.hardware import load_hardware
from boost.plan.interval import SPREADS, fit_probability, interval, kind_of


def test_meshes_have_their_own_spread() -> None:
    known, hardware = SPREADS, load_hardware("h100-80g")
    assert [kind_of(1, 1), kind_of(2, 1), kind_of(1, 4), kind_of(1, 1, 2)] == [
        "replicas",
        "sharded",
        "sharded",
        "sharded",
    ]
    low, high = interval(10.0, ParallelConfig(layout="single", dp=8), hardware)
    assert (low, high) == pytest.approx((10 * known["replicas"].low, 10 * known["replicas"].high)) and low < 10 < high
    assert interval(10.0, ParallelConfig(tp=2), hardware)[1] > high  # fewer rows with a wider spread
    calibrated = hardware.model_copy(update={"architecture": ""})
    assert interval(1.0, ParallelConfig(tp=2), calibrated) == (known["calibrated"].low, known["calibrated"].high)


def test_a_peak_fits_with_a_probability() -> None:
    assert fit_probability(100, 100) == pytest.approx(0.5)
    assert fit_probability(92, 100) == pytest.approx(0.952, abs=0.001)  # the default margin
    assert fit_probability(50, 100) > 0.999999 and fit_probability(120, 100) < 0.001
