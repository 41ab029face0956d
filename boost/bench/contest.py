"""Contenders timed in turns, in one run, and compared by ratios that come with an interval.

A machine that others share is slower at one time than at another, and a GPU slower when it is hot: what is timed one after the
other says more about the moment than about the contenders. So every round times each of them once, beginning with another one
each time, and a ratio is the median over the rounds of the ratio within a round.
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
"""Fewer timed rounds than this are refused."""

WARM_UP = 2
"""Uncounted rounds before them: kernels are chosen, buffers made, caches filled; the last says how often to repeat."""

RESAMPLES = 10_000
CONFIDENCE = 0.95
"""Of the interval of a ratio: the bootstrap's resamples of rounds, and the share of them that lies inside."""

Call = Callable[[], Iterable[Tensor]]
"""One repetition of what a contender does. Returns what it computed, or some of it: none of that may be all zeros."""


@dataclass(frozen=True)
class InterleavedTimings:
    """What one run of some contenders took. Seconds are the clock's, of one repetition, by contender in order of rounds."""

    seconds: dict[str, list[float]]
    repeats: dict[str, int]
    """Repetitions that one timed sample of a contender consists of."""
    probe_s: list[float]
    """Seconds of a fixed small work before each round: how steady the machine was."""


@dataclass(frozen=True)
class Spread:
    """Seconds of one contender: median and quartiles over the rounds."""

    median: float
    low: float
    high: float
    rounds: int


@dataclass(frozen=True)
class Ratio:
    """How many times one contender is another, with its bootstrap interval."""

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
    """Times every contender once a round, all processes of `mesh` at the same time.

    A sample begins when every process is ready and ends when the last one is done, device included. A contender that is
    shorter than `least_s` is repeated within its sample. Raises MeasurementError if a contender computes nothing but zeros or
    numbers that are not finite, or takes no time; ValueError below LEAST_ROUNDS.
    """
    if rounds < LEAST_ROUNDS:
        raise ValueError(f"{rounds} rounds; a result takes {LEAST_ROUNDS} at least")
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
                raise MeasurementError(f"{name} took {taken} s: the clock saw nothing; measure something longer")
            seconds[name].append(taken)
    return InterleavedTimings(seconds, repeats, probed)


def refuse_zeros(name: str, computed: Iterable[Tensor]) -> None:
    """Raises MeasurementError if one of the tensors has no number but zero, or one that is not finite, or if there is none.

    Zeros are multiplied faster on a GPU, and what is never computed faster still: a speed of zeros means nothing.
    """
    found = 0
    for found, tensor in enumerate(computed, start=1):  # noqa: B007
        values = tensor.detach()
        if not bool(torch.isfinite(values).all()):
            raise MeasurementError(f"{name} computed numbers that are not finite: its time would mean nothing")
        if not bool((values != 0).any()):
            raise MeasurementError(f"{name} computed nothing but zeros: its time would mean nothing")
    if not found:
        raise MeasurementError(f"{name} showed nothing that it computed: its time would mean nothing")


def spread(seconds: Sequence[float]) -> Spread:
    """Median and quartiles."""
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return Spread(statistics.median(seconds), low, high, len(seconds))


def ratio(over: Sequence[float], under: Sequence[float]) -> Ratio:
    """How many times the first takes of the second, both timed in the same rounds."""
    return bootstrap(lambda ours, theirs: np.median(ours / theirs, axis=-1), over, under)


def ratio_of_runs(over: Sequence[float], under: Sequence[float]) -> Ratio:
    """How many times the first takes of the second, which were timed in rounds of different runs: a quotient of medians.

    Each run's rounds are drawn by themselves. The interval knows how much rounds of one run differ, not how runs do.
    """
    return bootstrap(
        lambda ours, theirs: np.median(ours, axis=-1) / np.median(theirs, axis=-1), over, under, paired=False
    )


def bootstrap(statistic: Callable[..., np.ndarray], *samples: Sequence[float], paired: bool = True) -> Ratio:
    """A statistic of some contenders' seconds with its interval.

    `statistic` takes an array [..., rounds] of each and returns one number for each [...]. Rounds are drawn again with
    replacement, `paired`: the same for all contenders; the interval holds CONFIDENCE of what the statistic makes of the draws
    (Efron's percentile bootstrap, 1979). The draws are the same each time, so that a report made again says the same.
    Raises ValueError if contenders that are paired have different rounds.
    """
    counts = [len(sample) for sample in samples]
    if paired and len(set(counts)) > 1:
        raise ValueError(f"{' over '.join(map(str, counts))} rounds: these were not timed in the same rounds")
    values, rng = [np.asarray(sample, dtype=float) for sample in samples], np.random.default_rng(0)
    drawn = [rng.integers(0, count, (RESAMPLES, count)) for count in (counts[:1] if paired else counts)]
    found = statistic(
        *(value[rounds] for value, rounds in zip(values, drawn * len(counts) if paired else drawn, strict=True))
    )
    # Without interpolation: a statistic may be infinite in some of the draws.
    low, high = np.quantile(found, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], method="inverted_cdf")
    return Ratio(float(statistic(*values)), float(low), float(high))


def _repeats(once: float, least_s: float, mesh: Mesh) -> int:
    """So many that a sample lasts, the same on every process."""
    wanted = torch.tensor(float(math.ceil(least_s / once)) if once < least_s else 1.0, device=mesh.device)
    if mesh.size > 1:
        dist.all_reduce(wanted, dist.ReduceOp.MAX)
    return int(wanted)


def _sample(call: Call, repeats: int, mesh: Mesh) -> float:
    """Seconds of one repetition, from when all processes begin to when all are done."""
    _all_here(mesh)
    begun = time.perf_counter()
    for _ in range(repeats):
        call()
    _all_here(mesh)
    return (time.perf_counter() - begun) / repeats


def _all_here(mesh: Mesh) -> None:
    synchronize(mesh.device)
    mesh.barrier()
    synchronize(mesh.device)  # NCCL's barrier is issued, not waited for


def in_words(found: Ratio) -> str:
    """A ratio with its interval."""
    return f"{found.value:.2f} ({found.low:.2f} to {found.high:.2f})"
