"""Times contenders in interleaved rounds of one run and compares them by ratios with confidence intervals.

A shared machine's speed varies and a hot GPU slows down, so timing contenders one after another measures machine noise. Instead,
every round times each contender once, starting with a different one each time. A ratio is the median over rounds of the ratio
within each round.

Rounds of one launch share processes, memory layout and kernel choices, so they agree better with each other than with rounds of
other launches. Intervals therefore resample launches first, then the rounds within each.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.commands import LEAST_ROUNDS
from benchmarks.experiments.results import Goal, MeasurementError, Ratio
from boost.measure.speed import Probe, synchronize
from boost.parallel.mesh import Mesh
from boost.train.progress import progress

CONFIDENCE = 0.95
"""Confidence level of every interval in the evaluation."""


def t_interval(numbers: Sequence[float]) -> tuple[float, float, float]:
    """(mean, lower, upper): the t interval of the mean of at least two numbers, at CONFIDENCE. Raises statistics.StatisticsError
    for fewer."""
    from scipy.stats import t

    mean, spread = statistics.fmean(numbers), statistics.stdev(numbers)
    half = float(t.ppf((1 + CONFIDENCE) / 2, len(numbers) - 1)) * spread / math.sqrt(len(numbers))
    return mean, mean - half, mean + half


WARM_UP = 2
"""Default number of untimed rounds, for kernel selection, buffers and caches. The last one sets the number of repetitions."""

RESAMPLES = 10_000
"""Number of bootstrap resamples."""

LEAST_LAUNCHES = 3
"""With fewer launches, the acceleration of the BCa interval is estimated from rounds instead of launches."""

Seconds = Sequence[float] | Sequence[Sequence[float]] | np.ndarray
"""Seconds of one contender: the rounds of one launch, or of several launches."""

Call = Callable[[], Iterable[Tensor]]
"""Runs one repetition of a contender. Returns some of its results, none of which may be all zeros."""


@dataclass(frozen=True)
class InterleavedTimings:
    """Timings of one run: wall-clock seconds of one repetition, by contender and round."""

    seconds: dict[str, list[float]]
    repeats: dict[str, int]
    """Repetitions per timed sample, by contender."""
    probe_s: list[float]
    """Seconds of a small fixed workload before each round; shows how steady the machine was."""


@dataclass(frozen=True)
class Spread:
    """Seconds of one contender: median and quartiles over rounds."""

    median: float
    low: float
    high: float
    rounds: int


def largest(number: float, mesh: Mesh) -> float:
    """The maximum of a number over all processes."""
    found = torch.tensor(number, dtype=torch.double, device=mesh.device)
    if mesh.size > 1:
        dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def take_turns(
    calls: Mapping[str, Call],
    mesh: Mesh,
    rounds: int,
    *,
    least_s: float = 0.0,
    warm_up: int = WARM_UP,
    words: str = "rounds",
) -> InterleavedTimings:
    """Times every contender once per round, on all processes of `mesh` at once.

    A sample starts when every process is ready and ends when the last process and its device have finished. A contender
    shorter than `least_s` is repeated within its sample. `warm_up`: untimed rounds, at least 1, which is enough for contenders that
    have already run. Raises MeasurementError if a contender computes only zeros or non-finite numbers or takes no measurable time,
    and ValueError if `rounds` is below LEAST_ROUNDS.
    """
    if rounds < LEAST_ROUNDS:
        raise ValueError(f"{rounds} rounds; a result needs at least {LEAST_ROUNDS}")
    names = list(calls)
    repeats = {}
    for name in progress(names, f"{words}: warm-up", enabled=mesh.is_main):
        for _ in range(warm_up - 1):
            calls[name]()
        once, computed = _sample(calls[name], 1, mesh)
        refuse_zeros(name, computed)
        del computed
        repeats[name] = int(largest(math.ceil(least_s / max(once, 1e-9)) or 1, mesh))
    seconds: dict[str, list[float]] = {name: [] for name in names}
    probe, probed = Probe(mesh.device), []
    for number in progress(range(rounds), words, enabled=mesh.is_main):
        probed.append(probe.seconds())
        first = number % len(names)
        for name in names[first:] + names[:first]:
            taken = _sample(calls[name], repeats[name], mesh)[0]
            if not taken > 0:
                raise MeasurementError(f"{name} took {taken} s: too short to time; measure something longer")
            seconds[name].append(taken)
    return InterleavedTimings(seconds, repeats, probed)


def refuse_zeros(name: str, computed: Iterable[Tensor]) -> None:
    """Raises MeasurementError if any tensor is all zeros or has non-finite values, or if there are no tensors.

    GPUs multiply zeros faster, so timings on zeros are meaningless.
    """
    found = 0
    for found, tensor in enumerate(computed, start=1):  # noqa: B007
        values = tensor.detach()
        if not bool(torch.isfinite(values).all()):
            raise MeasurementError(f"{name} computed non-finite numbers: its time is meaningless")
        if not bool((values != 0).any()):
            raise MeasurementError(f"{name} computed only zeros: its time is meaningless")
    if not found:
        raise MeasurementError(f"{name} returned no results: its time is meaningless")


def launches(seconds: Seconds) -> np.ndarray:
    """Seconds as an array [launches, rounds]; a flat list is one launch. Raises ValueError if launches differ in length."""
    flat = [each for each in seconds if not isinstance(each, Sequence | np.ndarray)]
    nested = [each for each in seconds if isinstance(each, Sequence | np.ndarray)] + ([flat] if flat else [])
    if len({len(each) for each in nested}) > 1:
        raise ValueError(f"launches of {', '.join(str(len(each)) for each in nested)} rounds; all need the same number")
    return np.array(nested, dtype=float)


def pooled(seconds: Seconds) -> list[float]:
    """Seconds of all rounds of all launches."""
    found: list[float] = launches(seconds).reshape(-1).tolist()
    return found


def rounds_words(facts: Mapping[str, Any]) -> str:
    """Describes a result's number of rounds and launches."""
    count = facts.get("launches", 1)
    return f"{facts['rounds']} interleaved rounds" + (f" in each of {count} launches" if count > 1 else "")


def spread(seconds: Seconds) -> Spread:
    """Median and quartiles."""
    flat = pooled(seconds)
    low, _, high = statistics.quantiles(flat, n=4, method="inclusive")
    return Spread(statistics.median(flat), low, high, len(flat))


def ratio(over: Seconds, under: Seconds) -> Ratio:
    """Ratio of two contenders' times (over / under) from the same rounds."""
    return bootstrap(lambda ours, theirs: np.median(ours / theirs, axis=-1), over, under)


def bootstrap(statistic: Callable[..., np.ndarray], *samples: Seconds) -> Ratio:
    """Computes a statistic of contenders' seconds from the same rounds, and its confidence interval at CONFIDENCE.

    `statistic` takes one array [..., rounds of all launches] per contender and returns an array [...]. Launches are drawn with
    replacement, then rounds within each drawn launch; all contenders share the draws. The interval is bias-corrected and
    accelerated (BCa, Efron 1987). Draws are seeded, which makes reports reproducible. Raises ValueError if contenders have
    different numbers of launches or rounds.
    """
    arrays = [launches(sample) for sample in samples]
    if len({array.shape for array in arrays}) > 1:
        shown = " over ".join(str(array.size) for array in arrays)
        raise ValueError(f"{shown} rounds: these were not timed in the same rounds")
    drawn = _draws(arrays[0].shape, np.random.default_rng(0))
    flat = [array.reshape(-1) for array in arrays]
    found = statistic(*(array[drawn] for array in flat))
    value = float(statistic(*flat))
    # No interpolation: a statistic may be infinite in some draws.
    low, high = np.quantile(found, _shares(found, value, _left_out(statistic, arrays)), method="inverted_cdf")
    return Ratio(value, float(low), float(high))


def _draws(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Drawn indices [RESAMPLES, launches x rounds] into the flattened seconds of one contender."""
    count, rounds = shape
    launch = rng.integers(0, count, (RESAMPLES, count, 1))
    return (launch * rounds + rng.integers(0, rounds, (RESAMPLES, count, rounds))).reshape(RESAMPLES, -1)


def _left_out(statistic: Callable[..., np.ndarray], arrays: Sequence[np.ndarray]) -> np.ndarray:
    """The statistic without each launch, or without each round if there are fewer than three launches."""
    axis = 0 if len(arrays[0]) >= LEAST_LAUNCHES else None
    parts = len(arrays[0]) if axis == 0 else arrays[0].size
    kept = ([np.delete(array, part, axis=axis).reshape(-1) for array in arrays] for part in range(parts))
    return np.array([float(statistic(*each)) for each in kept])


def _shares(found: np.ndarray, value: float, left_out: np.ndarray) -> list[float]:
    """The quantiles of the draws that bound the BCa interval."""
    normal = statistics.NormalDist()
    below = float(np.mean(found < value) + np.mean(found == value) / 2)
    bias = normal.inv_cdf(min(max(below, 1 / RESAMPLES), 1 - 1 / RESAMPLES))
    acceleration = 0.0
    if np.isfinite(left_out).all() and np.ptp(left_out) > 0:  # Efron and Tibshirani (1993), equation 14.15
        influences = left_out.mean() - left_out
        acceleration = float((influences**3).sum() / (6 * (influences**2).sum() ** 1.5))
    ends = []
    for share in ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2):
        shifted = bias + normal.inv_cdf(share)
        ends.append(normal.cdf(bias + shifted / (1 - acceleration * shifted)))
    return ends


def _sample(call: Call, repeats: int, mesh: Mesh) -> tuple[float, Iterable[Tensor]]:
    """(seconds per repetition, from when all processes are ready until all are done; results of the last repetition)."""
    _all_here(mesh)
    begun = time.perf_counter()
    for _ in range(repeats - 1):
        call()
    computed = call()
    _all_here(mesh)
    return (time.perf_counter() - begun) / repeats, computed


def _all_here(mesh: Mesh) -> None:
    synchronize(mesh.device)
    mesh.barrier()
    synchronize(mesh.device)  # NCCL's barrier is asynchronous


def in_words(found: Ratio) -> str:
    """Formats a ratio with its interval."""
    return f"{found.value:.2f} ({found.low:.2f} to {found.high:.2f})"


def at_least(what: str, least: float, where: str, found: Ratio, note: str = "") -> Goal:
    """The goal that a ratio is at least `least`, at the lower end of its interval. `note`: added to the ratio."""
    shown, met = f"{in_words(found)} x{note}", found.low >= least
    return Goal(what, f">= {least:g}x", where, shown, met, ratio=found, least=least)


def verdict_words(found: Ratio) -> str:
    """Formats a ratio with its interval, and adds that no difference is shown if the interval contains 1."""
    return in_words(found) + (", no difference shown" if found.low <= 1 <= found.high else "")
