"""Tests intervals against tabulated quantiles of Student's t distribution."""

import math
import statistics

import pytest

from benchmarks.experiments.intervals import t_interval


def test_five_numbers() -> None:
    mean, low, high = t_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    half = 2.776445 * math.sqrt(2.5) / math.sqrt(5)
    assert (mean, low, high) == pytest.approx((3.0, 3.0 - half, 3.0 + half), rel=1e-6)


def test_one_number_has_no_interval() -> None:
    with pytest.raises(statistics.StatisticsError):
        t_interval([1.0])
