"""Draws a step recorded by --train.profile: when each process computes, and when its collectives are in flight.

    boost train demo --train.steps 20 --train.profile '[10, 12]'
    python -m benchmarks timeline runs/demo --step 11

The traces themselves open in ui.perfetto.dev. On CPUs, a collective is in flight from its start to the end of its wait, as recorded
by `boost.parallel.collectives`; torch's own (sums of gradients), while gloo runs it or the process waits for it. On GPUs, a
collective is in flight while its kernel runs.
"""

import argparse
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.experiments.results import table
from boost.drawing import pyplot, write
from boost.errors import ConfigError, DataError
from boost.measure.speed import synchronize
from boost.parallel.mesh import Mesh

NOTED = re.compile(r"(start|wait for) (\w+ #\d+ of .*), (\d+) bytes")
OF_GLOO = re.compile(r"gloo:(?!send|recv)\w+")
WAIT = "_c10d_functional::wait_tensor"
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
    """When an operator (CPU) or kernel (GPU) runs, excluding collectives and waits for them."""
    flying: tuple[Interval, ...]
    """When at least one collective is in flight."""

    @property
    def waiting(self) -> tuple[Interval, ...]:
        """When a collective is in flight and nothing is computed (exposed communication)."""
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
    """Reads step `number` of a trace (None: the middle recorded step). Returns (number, step).

    Raises DataError if the file is not a trace written by train.profile, or ConfigError if it lacks this step.
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
    flights += [_interval(event, since) for event in events if OF_GLOO.fullmatch(event["name"])]
    for each in [_interval(event, since) for event in events if event["name"] == WAIT]:
        if not any(each.begin <= own.begin < each.end for own in waits):  # one of torch's own collectives
            waits.append(each)
            flights.append(each)
    operators = union(_interval(event, since) for event in events if event.get("cat") == "cpu_op")
    return without(operators, union(waits)), union(flights)


COMPUTES, WAITS, FLIES = "computing", "waiting for communication", "collective in flight"
COLORS = {COMPUTES: "#5c7cfa", WAITS: "#e0a08a", FLIES: "#0e9aa0"}
GAP_S = 2e-4
"""Gaps shorter than this many seconds are not drawn."""

MOST_SHAPES = 40
"""Maximum number of intervals per row to draw as vector shapes; more are rasterized."""

HEADINGS = ("rank:", "step ms:", "compute ms:", "in flight ms:", "waiting ms:", "overlapped:")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="run directory")
    parser.add_argument("--step", type=int, metavar="N", help="recorded step to draw (default: the middle one)")
    words = ".svg, .png or .pdf file (default: RUN/profile/timeline.svg)"
    parser.add_argument("--out", type=Path, metavar="FILE", help=words)


def run(args: argparse.Namespace) -> int:
    out, step = args.out or args.run_dir / "profile" / "timeline.svg", args.step
    if out.suffix not in (".svg", ".png", ".pdf"):
        raise ConfigError(f"--out = {out} must end in one of .svg, .png, .pdf")
    out.parent.mkdir(parents=True, exist_ok=True)
    traces, steps = recorded(args.run_dir), []
    for rank, path in traces.items():
        step, read = read_step(path, rank, step)
        steps.append(read)
    assert step is not None
    print(f"step {step}\n\n{table(HEADINGS, rows(steps))}\n{out}")
    draw(step, steps, out)
    return 0


def as_numbers(step: ProcessStep) -> dict[str, Any]:
    """Serializes a step for a result file: intervals in seconds, rounded to 10 us, without invisible gaps."""
    intervals = {
        name: [[round(t, 5) for t in each] for each in union(getattr(step, name), GAP_S / 4)]
        for name in ("computing", "flying")
    }
    return {"rank": step.rank, "step": [round(t, 5) for t in step.step], **intervals}


def from_numbers(numbers: Mapping[str, Any]) -> ProcessStep:
    """Inverse of `as_numbers`."""
    computing, flying = (tuple(Interval(*each) for each in numbers[name]) for name in ("computing", "flying"))
    return ProcessStep(numbers["rank"], Interval(*numbers["step"]), computing, flying)


def record(step: Callable[[], object], mesh: Mesh) -> ProcessStep:
    """Records one step of this process; recording slows it down. All processes must call this function together."""
    step()
    with tempfile.TemporaryDirectory(prefix="boost-timeline-") as folder:
        path = Path(folder, "rank0.json")
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if mesh.device.type == "cuda" else [])]
        mesh.barrier()
        with profile(activities=activities) as recorder:
            with record_function("step 0"):
                step()
            synchronize(mesh.device)
        recorder.export_chrome_trace(str(path))
        return read_step(path, mesh.rank)[1]


def recorded(run: Path) -> dict[int, Path]:
    """Returns the traces of a run by rank. Raises ConfigError if there are none."""
    found = {int(path.stem[4:]): path for path in (run / "profile").glob("rank*.json") if path.stem[4:].isdecimal()}
    if not found:
        raise ConfigError(
            f"{run} has no recorded steps (profile/rank0.json); record some with boost train ... --train.profile '[10, 12]'"
        )
    return dict(sorted(found.items()))


def draw(number: int, steps: Sequence[ProcessStep], path: Path) -> None:
    """Draws one step of all processes to a file."""
    figure, axis = pyplot().subplots(figsize=(12, 1.2 + 0.7 * len(steps)), layout="constrained")
    draw_on(axis, steps)
    axis.set_xlabel(f"milliseconds of step {number}")
    axis.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    write(figure, path)


def draw_on(axis: Any, steps: Sequence[ProcessStep]) -> None:
    """Draws two rows per process: computation, and collectives in flight. Time 0 is the earliest start of a process's step."""
    begin = min(each.step.begin for each in steps)
    for place, each in enumerate(steps):
        for name, intervals, low, height in (
            (COMPUTES, each.computing, 0.05, 0.45),
            (WAITS, each.waiting, 0.05, 0.45),
            (FLIES, each.flying, 0.55, 0.25),
        ):
            bars = [((b - begin) * 1e3, (e - b) * 1e3) for b, e in union(intervals, GAP_S)]
            label = name if not place else None
            drawn = axis.broken_barh(bars, (place + low, height), color=COLORS[name], linewidth=0, label=label)
            drawn.set_rasterized(len(bars) > MOST_SHAPES)
    axis.set_yticks([place + 0.4 for place in range(len(steps))], [f"rank {each.rank}" for each in steps])
    axis.invert_yaxis()
    axis.update_datalim([(0.0, 0.05)])  # the first bar may begin a little later
    axis.margins(x=0)
    axis.grid(visible=True)


def rows(steps: Sequence[ProcessStep]) -> Iterator[tuple[str, ...]]:
    """Yields (rank, step in ms, computing, in flight, waiting, overlapped fraction) as text."""
    for each in steps:
        flying, waiting = total(each.flying), total(each.waiting)
        parts = each.step.seconds, total(each.computing), flying, waiting
        overlapped = 1 - waiting / flying if flying else 1.0
        yield str(each.rank), *(f"{seconds * 1e3:.1f}" for seconds in parts), f"{overlapped:.0%}"
