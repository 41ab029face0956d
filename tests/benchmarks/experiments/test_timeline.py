"""The numbers of a recorded step."""

import json
from pathlib import Path
from typing import Any

from benchmarks.experiments.timeline import Interval, ProcessStep, as_numbers, from_numbers, read_step, rows


def event(name: str, begin: float, end: float, category: str = "cpu_op") -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": begin * 1e3, "dur": (end - begin) * 1e3}


def trace(folder: Path, *events: dict[str, Any], rank: int = 0) -> Path:
    path = folder / "profile" / f"rank{rank}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"baseTimeNanoseconds": 0, "traceEvents": [{"ph": "M", "name": "x"}, *events]}))
    return path


STEP = event("step 7", 0, 100, "user_annotation")
ON_CPU = (
    STEP,
    event("aten::mm", 0, 30),
    event("aten::t", 5, 6),
    event("start all_reduce #1 of tp, 64 bytes", 20, 21, "user_annotation"),
    event("start all_reduce #2 of tp, 64 bytes", 30, 31, "user_annotation"),
    event("_c10d_functional::wait_tensor", 40, 60),
    event("wait for all_reduce #1 of tp, 64 bytes", 40, 55, "user_annotation"),
    event("aten::add", 60, 80),
    event("wait for all_reduce #2 of tp, 64 bytes", 80, 90, "user_annotation"),
    event("aten::mm", 95, 200),
)


def milliseconds(intervals: tuple[Interval, ...]) -> list[tuple[float, float]]:
    return [(round(begin * 1e3, 6), round(end * 1e3, 6)) for begin, end in intervals]


def test_a_collective_of_a_cpu_is_on_the_wire_from_its_start_to_the_end_of_its_wait(tmp_path: Path) -> None:
    number, step = read_step(trace(tmp_path, *ON_CPU), 0)
    assert number == 7
    assert milliseconds(step.computing) == [(0, 30), (55, 80), (95, 100)]
    assert milliseconds(step.flying) == [(20, 90)], "the second starts while the first is in flight"
    assert milliseconds(step.waiting) == [(30, 55), (80, 90)]


def test_a_wait_for_a_collective_of_torch_is_not_computation(tmp_path: Path) -> None:
    events = (
        *ON_CPU[:-1],
        event("_c10d_functional::all_reduce_", 90, 91),
        event("gloo:all_reduce", 92, 96, "user_annotation"),
        event("gloo:send", 97, 98, "user_annotation"),
        event("_c10d_functional::wait_tensor", 94, 97),
    )
    _, step = read_step(trace(tmp_path, *events), 0)
    assert milliseconds(step.computing) == [(0, 30), (55, 80), (90, 91)]
    assert milliseconds(step.flying) == [(20, 90), (92, 97)]


def test_kernels_of_a_gpu_are_one_or_the_other(tmp_path: Path) -> None:
    events = (
        STEP,
        event("aten::mm", 0, 90),
        event("ampere_gemm", 10, 50, "kernel"),
        event("ncclDevKernel_AllReduce_Sum_bf16", 40, 60, "kernel"),
    )
    _, step = read_step(trace(tmp_path, *events), 0)
    assert milliseconds(step.computing) == [(10, 50)], "host activity is not drawn"
    assert milliseconds(step.waiting) == [(50, 60)]


RECORDED = ProcessStep(
    1, Interval(10.0, 10.1), (Interval(10.0, 10.03), Interval(10.055, 10.08)), (Interval(10.02, 10.09),)
)


def test_numbers_of_a_step() -> None:
    assert list(rows([RECORDED])) == [("1", "100.0", "55.0", "70.0", "35.0", "50%")]
    again = from_numbers(json.loads(json.dumps(as_numbers(RECORDED))))
    assert list(rows([again])) == list(rows([RECORDED]))
