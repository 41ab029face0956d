"""Intervals of means over seeds."""

import math
import statistics
from collections.abc import Sequence

CONFIDENCE = 0.95
"""Of every interval of the evaluation."""


def t_interval(numbers: Sequence[float]) -> tuple[float, float, float]:
    """(mean, lower, upper): the t interval, at CONFIDENCE, of the mean of two numbers or more. Raises
    statistics.StatisticsError for fewer."""
    from scipy.stats import t

    mean, spread = statistics.fmean(numbers), statistics.stdev(numbers)
    half = float(t.ppf((1 + CONFIDENCE) / 2, len(numbers) - 1)) * spread / math.sqrt(len(numbers))
    return mean, mean - half, mean + half
