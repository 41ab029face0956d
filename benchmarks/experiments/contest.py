"""Times contenders in interleaved rounds of one run and compares them by ratios with confidence intervals.

A shared machine changes speed over time and a hot GPU slows down, so timing contenders one after another measures machine
noise. Instead, every round times each contender once, starting with a different one each time. A ratio is the median over
rounds of the ratio within each round.

Rounds of one launch have the same processes, memory layout and kernel choices, so they agree better with each other than with
another launch. Intervals therefore resample launches first, then the rounds within each.
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

from benchmarks.experiments.intervals import CONFIDENCE
from boost.errors import MeasurementError
from boost.measure.speed import Probe, synchronize
from boost.parallel.mesh import Mesh
from boost.train.console import progress

LEAST_ROUNDS = 7
"""Minimum number of timed rounds."""

WARM_UP = 2
"""Untimed warm-up rounds by default, for kernel selection, buffers and caches. The last one sets the number of repetitions."""

RESAMPLES = 10_000
"""Number of bootstrap resamples."""

LEAST_LAUNCHES = 3
"""With fewer launches, the skewness of the interval (its acceleration) comes from rounds instead of launches."""

Seconds = Sequence[float] | Sequence[Sequence[float]] | np.ndarray
"""Seconds of one contender: rounds of a single launch, or launches with their rounds."""

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


@dataclass(frozen=True)
class Ratio:
    """Ratio of two contenders, with its bootstrap interval."""

    value: float
    low: float
    high: float


def largest(number: float, mesh: Mesh) -> float:
    """Maximum of a number over all processes."""
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

    A sample starts when every process is ready and ends when the last one, including its device, is done. A contender
    shorter than `least_s` is repeated within its sample. `warm_up`: untimed rounds, at least 1; contenders that have run before
    need no more. Raises MeasurementError if a contender computes only zeros or non-finite numbers or takes no measurable time, and
    ValueError below LEAST_ROUNDS.
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
        repeats[name] = _repeats(once, least_s, mesh)
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
    """A description of the number of rounds and launches of a result."""
    count = facts.get("launches", 1)
    return f"{facts['rounds']} interleaved rounds" + (f" of each of {count} launches" if count > 1 else "")


def spread(seconds: Seconds) -> Spread:
    """Median and quartiles."""
    flat = pooled(seconds)
    low, _, high = statistics.quantiles(flat, n=4, method="inclusive")
    return Spread(statistics.median(flat), low, high, len(flat))


def ratio(over: Seconds, under: Seconds) -> Ratio:
    """Ratio of two contenders' times (over / under), timed in the same rounds."""
    return bootstrap(lambda ours, theirs: np.median(ours / theirs, axis=-1), over, under)


def ratio_of_runs(over: Seconds, under: Seconds) -> Ratio:
    """Ratio of medians (over / under) of times from different runs.

    Resamples the rounds of each run independently. The interval covers variation within runs, not between them.
    """
    return bootstrap(
        lambda ours, theirs: np.median(ours, axis=-1) / np.median(theirs, axis=-1), over, under, paired=False
    )


def bootstrap(statistic: Callable[..., np.ndarray], *samples: Seconds, paired: bool = True) -> Ratio:
    """Computes a statistic of contenders' seconds and its confidence interval at CONFIDENCE.

    `statistic` takes one array [..., rounds of all launches] per contender and returns an array [...]. Launches are drawn with
    replacement, then rounds within each draw (`paired`: the same for all contenders). The interval is bias-corrected and
    accelerated (BCa, Efron 1987). Draws are seeded, which makes reports reproducible. Raises ValueError if paired contenders
    have different numbers of launches or rounds.
    """
    arrays = [launches(sample) for sample in samples]
    if paired and len({array.shape for array in arrays}) > 1:
        shown = " over ".join(str(array.size) for array in arrays)
        raise ValueError(f"{shown} rounds: these were not timed in the same rounds")
    rng = np.random.default_rng(0)
    drawn = [_draws(array.shape, rng) for array in (arrays[:1] if paired else arrays)]
    flat = [array.reshape(-1) for array in arrays]
    found = statistic(
        *(each[rounds] for each, rounds in zip(flat, drawn * len(arrays) if paired else drawn, strict=True))
    )
    value = float(statistic(*flat))
    shares = _shares(found, value, _left_out(statistic, arrays, paired))
    # No interpolation: a statistic may be infinite in some draws.
    low, high = np.quantile(found, shares, method="inverted_cdf")
    return Ratio(value, float(low), float(high))


def _draws(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Places [RESAMPLES, launches x rounds] in the flattened seconds of one contender."""
    count, rounds = shape
    launch = rng.integers(0, count, (RESAMPLES, count, 1))
    return (launch * rounds + rng.integers(0, rounds, (RESAMPLES, count, rounds))).reshape(RESAMPLES, -1)


def _left_out(statistic: Callable[..., np.ndarray], arrays: Sequence[np.ndarray], paired: bool) -> list[np.ndarray]:
    """The statistic without each launch, or without each round if there are fewer than three launches; by independent sample."""
    whole = [array.reshape(-1) for array in arrays]

    def without(part: int, of: int) -> float:
        """Without part number `part` of sample `of`; of all samples if paired."""
        kept = list(whole)
        for number in range(len(arrays)) if paired else [of]:
            array = arrays[number]
            kept[number] = np.delete(array, part, axis=0 if len(array) >= LEAST_LAUNCHES else None).reshape(-1)
        return float(statistic(*kept))

    parts = [len(array) if len(array) >= LEAST_LAUNCHES else array.size for array in arrays]
    return [np.array([without(part, of) for part in range(parts[of])]) for of in range(1 if paired else len(arrays))]


def _shares(found: np.ndarray, value: float, left_out: Sequence[np.ndarray]) -> list[float]:
    """The two quantiles of the draws at which the BCa interval ends."""
    normal = statistics.NormalDist()
    below = float(np.mean(found < value) + np.mean(found == value) / 2)
    bias = normal.inv_cdf(min(max(below, 1 / RESAMPLES), 1 - 1 / RESAMPLES))
    # Efron and Tibshirani (1993), equation 14.15; of several independent samples, with influences scaled by their sizes.
    cubes = squares = 0.0
    if all(np.isfinite(each).all() for each in left_out):
        influences = [(each.mean() - each) * (len(each) - 1) / len(each) for each in left_out]
        cubes, squares = (sum(float((each**power).sum()) for each in influences) for power in (3, 2))
    acceleration = cubes / (6 * squares**1.5) if squares > 0 else 0.0
    ends = []
    for share in ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2):
        shifted = bias + normal.inv_cdf(share)
        ends.append(normal.cdf(bias + shifted / (1 - acceleration * shifted)))
    return ends


def _repeats(once: float, least_s: float, mesh: Mesh) -> int:
    """Number of repetitions per sample, the same on every process."""
    wanted = torch.tensor(float(math.ceil(least_s / once)) if once < least_s else 1.0, device=mesh.device)
    if mesh.size > 1:
        dist.all_reduce(wanted, dist.ReduceOp.MAX)
    return int(wanted)


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


def verdict_words(found: Ratio) -> str:
    """The same for a comparison with 1: an interval that holds 1 shows no difference."""
    return in_words(found) + (", no difference shown" if found.low <= 1 <= found.high else "")
