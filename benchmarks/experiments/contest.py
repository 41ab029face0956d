"""Times contenders in interleaved rounds of one run and compares them by ratios with confidence intervals.

A shared machine changes speed over time and a hot GPU slows down, so timing contenders one after another measures machine
noise. Instead, every round times each contender once, starting with a different one each time. A ratio is the median over
rounds of the ratio within each round.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from boost.errors import MeasurementError
from boost.measure.speed import Probe, synchronize
from boost.parallel.mesh import Mesh
from boost.train.console import progress

LEAST_ROUNDS = 7
"""Minimum number of timed rounds."""

WARM_UP = 2
"""Untimed warm-up rounds, for kernel selection, buffers and caches. The last one sets the number of repetitions."""

RESAMPLES = 10_000
CONFIDENCE = 0.95
"""Number of bootstrap resamples, and confidence level of the intervals."""

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


def take_turns(
    calls: Mapping[str, Call],
    mesh: Mesh,
    rounds: int,
    *,
    least_s: float = 0.0,
    words: str = "rounds",
) -> InterleavedTimings:
    """Times every contender once per round, on all processes of `mesh` at once.

    A sample starts when every process is ready and ends when the last one, including its device, is done. A contender
    shorter than `least_s` is repeated within its sample. Raises MeasurementError if a contender computes only zeros or
    non-finite numbers or takes no measurable time, and ValueError below LEAST_ROUNDS.
    """
    if rounds < LEAST_ROUNDS:
        raise ValueError(f"{rounds} rounds; a result needs at least {LEAST_ROUNDS}")
    names = list(calls)
    repeats = {}
    for name in progress(names, f"{words}: warm-up", enabled=mesh.is_main):
        for _ in range(WARM_UP - 1):
            computed = calls[name]()
        refuse_zeros(name, computed)
        del computed
        repeats[name] = _repeats(_sample(calls[name], 1, mesh), least_s, mesh)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    probe, probed = Probe(mesh.device), []
    for number in progress(range(rounds), words, enabled=mesh.is_main):
        probed.append(probe.seconds())
        first = number % len(names)
        for name in names[first:] + names[:first]:
            taken = _sample(calls[name], repeats[name], mesh)
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


def spread(seconds: Sequence[float]) -> Spread:
    """Median and quartiles."""
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return Spread(statistics.median(seconds), low, high, len(seconds))


def ratio(over: Sequence[float], under: Sequence[float]) -> Ratio:
    """Ratio of two contenders' times (over / under), timed in the same rounds."""
    return bootstrap(lambda ours, theirs: np.median(ours / theirs, axis=-1), over, under)


def ratio_of_runs(over: Sequence[float], under: Sequence[float]) -> Ratio:
    """Ratio of medians (over / under) of times from different runs.

    Resamples the rounds of each run independently. The interval covers variation within runs, not between them.
    """
    return bootstrap(
        lambda ours, theirs: np.median(ours, axis=-1) / np.median(theirs, axis=-1), over, under, paired=False
    )


def bootstrap(statistic: Callable[..., np.ndarray], *samples: Sequence[float], paired: bool = True) -> Ratio:
    """Computes a statistic of contenders' seconds and its confidence interval.

    `statistic` takes one array [..., rounds] per contender and returns an array [...]. Rounds are resampled with replacement
    (`paired`: the same rounds for all contenders). The interval is Efron's percentile bootstrap (1979) at CONFIDENCE.
    Draws are seeded, which makes reports reproducible. Raises ValueError if paired contenders have different numbers of rounds.
    """
    counts = [len(sample) for sample in samples]
    if paired and len(set(counts)) > 1:
        raise ValueError(f"{' over '.join(map(str, counts))} rounds: these were not timed in the same rounds")
    values, rng = [np.asarray(sample, dtype=float) for sample in samples], np.random.default_rng(0)
    drawn = [rng.integers(0, count, (RESAMPLES, count)) for count in (counts[:1] if paired else counts)]
    found = statistic(
        *(value[rounds] for value, rounds in zip(values, drawn * len(counts) if paired else drawn, strict=True))
    )
    # No interpolation: a statistic may be infinite in some draws.
    low, high = np.quantile(found, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], method="inverted_cdf")
    return Ratio(float(statistic(*values)), float(low), float(high))


def _repeats(once: float, least_s: float, mesh: Mesh) -> int:
    """Number of repetitions per sample, the same on every process."""
    wanted = torch.tensor(float(math.ceil(least_s / once)) if once < least_s else 1.0, device=mesh.device)
    if mesh.size > 1:
        dist.all_reduce(wanted, dist.ReduceOp.MAX)
    return int(wanted)


def _sample(call: Call, repeats: int, mesh: Mesh) -> float:
    """Seconds per repetition, from when all processes are ready until all are done."""
    _all_here(mesh)
    begun = time.perf_counter()
    for _ in range(repeats):
        call()
    _all_here(mesh)
    return (time.perf_counter() - begun) / repeats


def _all_here(mesh: Mesh) -> None:
    synchronize(mesh.device)
    mesh.barrier()
    synchronize(mesh.device)  # NCCL's barrier is asynchronous


def in_words(found: Ratio) -> str:
    """Formats a ratio with its interval."""
    return f"{found.value:.2f} ({found.low:.2f} to {found.high:.2f})"
