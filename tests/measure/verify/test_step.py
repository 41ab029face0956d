"""A step against its prediction."""

import pytest

from boost.config import load
from boost.measure.verify.step import _bytes, _memory, _time, usual
from boost.plan.hardware import load_hardware
from boost.plan.timing import predict

CONFIG = load("boost-1b", ["--parallel.tp=4", "--train.global_batch=1", "--train.micro_batch=1", "--train.seq_len=2048",
                           "--train.compute_dtype=bfloat16"])  # fmt: skip
HARDWARE = load_hardware("a100-80g")


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "ok"), (1.1, "ok"), (2.0, "note"), (0.5, "note")])
def test_a_step_that_takes_another_time_than_predicted_is_noted(factor: float, verdict: str) -> None:
    seconds = factor * predict(CONFIG, HARDWARE).seconds
    kept: list[dict[str, float]] = []
    seen = {"seconds": seconds, "computing": 3.0, "waiting": 1.0, "peak": 1.0, "sent": 2.0}
    found = _time(CONFIG, HARDWARE, kept, [seen, seen | {"peak": 5.0}])
    assert found.verdict == verdict, found.detail
    assert kept == [seen | {"peak": 5.0}]
    assert ("computing takes" in found.advice or "waiting" in found.advice) == (verdict == "note")


def test_without_a_profile_it_is_only_measured() -> None:
    found = _time(CONFIG, None, [], [{"seconds": 0.5, "computing": 3.0, "waiting": 1.0, "peak": 1.0, "sent": 2.0}])
    assert found.verdict == "ok"
    assert found.detail.startswith("500 ms, 1.02k tok/s per device; computing 375, waiting 125; no hardware profile")


def test_bytes_are_exact_and_memory_is_not() -> None:
    assert (_bytes(100, 100).verdict, _bytes(101, 100).verdict) == ("ok", "failed")
    assert (_memory(100e6, 105_000_000).verdict, _memory(100e6, 120_000_000).verdict) == ("ok", "note")


@pytest.mark.parametrize("processes", [1, 2, 3, 8, 16])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_usual_step_takes_all_processes(processes: int, device: str) -> None:
    assert usual(processes, device).parallel.world_size == processes
