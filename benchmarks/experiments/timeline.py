"""Draws a step recorded by --train.profile: when each process computes, and when its collectives are in flight.

    boost train demo --train.steps 20 --train.profile '[10, 12]'
    python -m benchmarks timeline runs/demo --step 11

The traces themselves open in ui.perfetto.dev.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.experiments.results import table
from benchmarks.experiments.step_trace import Interval, ProcessStep, read_step, total, union
from boost.drawing import pyplot, tidy, write
from boost.errors import ConfigError
from boost.measure.speed import synchronize
from boost.parallel.mesh import Mesh

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
    """Records one step of this process; recording slows it down. All processes must call it together."""
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
    """Draws two rows per process: computation, and collectives in flight. Time 0 is the start of the first process's step."""
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
    tidy(axis)


def rows(steps: Sequence[ProcessStep]) -> Iterator[tuple[str, ...]]:
    """Yields (rank, step in ms, computing, in flight, waiting, overlapped fraction) as text."""
    for each in steps:
        flying, waiting = total(each.flying), total(each.waiting)
        parts = each.step.seconds, total(each.computing), flying, waiting
        overlapped = 1 - waiting / flying if flying else 1.0
        yield str(each.rank), *(f"{seconds * 1e3:.1f}" for seconds in parts), f"{overlapped:.0%}"
