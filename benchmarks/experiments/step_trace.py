"""Reads a recorded step: when each process computes, and when its collectives are in flight.

Reads the Chrome traces of `train.profile`, one per process. On CPUs a collective is in flight from its start to the end of its
wait, as recorded by `boost.parallel.exchange`; on GPUs, while its kernel runs.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from boost.errors import ConfigError, DataError

NOTED = re.compile(r"(start|wait for) (\w+ #\d+ of .*), (\d+) bytes")
STEP = re.compile(r"step (\d+)")


class Interval(NamedTuple):
    """An interval in seconds since the epoch."""

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        """Length in seconds."""
        return self.end - self.begin


@dataclass(frozen=True)
class ProcessStep:
    """One step of one process. Intervals are disjoint, sorted, and within the step."""

    rank: int
    step: Interval
    computing: tuple[Interval, ...]
    """When an operator (CPU) or kernel (GPU) runs that is neither a collective nor a wait for one."""
    flying: tuple[Interval, ...]
    """When at least one collective is in flight."""

    @property
    def waiting(self) -> tuple[Interval, ...]:
        """When a collective is in flight and nothing is computed: exposed communication."""
        return without(self.flying, self.computing)


def total(intervals: Iterable[Interval]) -> float:
    """Total length of intervals in seconds."""
    return sum(each.seconds for each in intervals)


def union(intervals: Iterable[Interval], gap: float = 0.0) -> tuple[Interval, ...]:
    """Returns disjoint, sorted intervals. Intervals that are at most `gap` apart are merged."""
    found: list[Interval] = []
    for each in sorted(intervals):
        if found and each.begin <= found[-1].end + gap:
            found[-1] = Interval(found[-1].begin, max(found[-1].end, each.end))
        else:
            found.append(each)
    return tuple(found)


def without(intervals: Iterable[Interval], removed: Sequence[Interval]) -> tuple[Interval, ...]:
    """Subtracts disjoint, sorted intervals from disjoint ones."""
    left: list[Interval] = []
    for begin, end in intervals:
        for other in removed:
            if other.end <= begin or other.begin >= end:
                continue
            if other.begin > begin:
                left.append(Interval(begin, other.begin))
            begin = other.end
        if begin < end:
            left.append(Interval(begin, end))
    return tuple(left)


def within(intervals: Iterable[Interval], step: Interval) -> tuple[Interval, ...]:
    """Clips intervals to a step."""
    cut = (Interval(max(each.begin, step.begin), min(each.end, step.end)) for each in intervals)
    return tuple(each for each in cut if each.begin < each.end)


def read_step(path: Path, rank: int, number: int | None = None) -> tuple[int, ProcessStep]:
    """Reads step `number` of a trace (None: the middle one of those recorded). Returns (number, step).

    Raises DataError if the file is not a trace of train.profile, ConfigError if it does not have this step.
    """
    try:
        trace: Any = json.loads(path.read_text(encoding="utf-8"))
        since = float(trace.get("baseTimeNanoseconds", 0)) * 1e-9
        events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
        steps = {int(found[1]): _interval(e, since) for e in events if (found := STEP.fullmatch(e["name"]))}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is not a trace written by train.profile: {error}") from None
    if not steps:
        raise DataError(f"{path} has no steps; it was recorded by an older version of boost or is truncated")
    if number is None:
        number = sorted(steps)[len(steps) // 2]
    if number not in steps:
        has = ", ".join(map(str, sorted(steps)))
        raise ConfigError(f"--step = {number} was not recorded in {path}; recorded steps: {has}")
    step = steps[number]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    computing, flying = _on_gpu(kernels, since) if kernels else _on_cpu(events, since)
    computing, flying = within(computing, step), within(flying, step)
    return number, ProcessStep(rank, step, computing, flying)


def _interval(event: dict[str, Any], since: float) -> Interval:
    begin = since + float(event["ts"]) * 1e-6
    return Interval(begin, begin + float(event["dur"]) * 1e-6)


def _on_gpu(kernels: Sequence[dict[str, Any]], since: float) -> tuple[tuple[Interval, ...], tuple[Interval, ...]]:
    sides: dict[bool, list[Interval]] = {False: [], True: []}
    for event in kernels:
        sides["nccl" in event["name"].lower()].append(_interval(event, since))
    return union(sides[False]), union(sides[True])


def _on_cpu(events: Sequence[dict[str, Any]], since: float) -> tuple[tuple[Interval, ...], tuple[Interval, ...]]:
    begins: dict[str, float] = {}
    waits, flights = list[Interval](), list[Interval]()
    for event in sorted(events, key=lambda event: float(event["ts"])):
        if not (found := NOTED.fullmatch(event["name"])):
            continue
        where = _interval(event, since)
        if found[1] == "start":
            begins[found[2]] = where.begin
        else:
            waits.append(where)
            flights.append(Interval(begins.pop(found[2], where.begin), where.end))
    operators = union(_interval(event, since) for event in events if event.get("cat") == "cpu_op")
    return without(operators, union(waits)), union(flights)
