"""A step against its prediction."""

import pytest

from boost.config import load
from boost.measure.steps import prediction
from boost.measure.verify.step import judged, usual
from boost.plan.hardware import load_hardware

CONFIG = load("boost-1b", ["--parallel.tp=4", "--train.global_batch=1", "--train.micro_batch=1", "--train.seq_len=2048",
                           "--train.compute_dtype=bfloat16"])  # fmt: skip
HARDWARE = load_hardware("a100-80g")


@pytest.mark.parametrize(
    ("slower", "more", "verdict"),
    [(1.0, 1.0, "ok"), (1.1, 1.05, "ok"), (2.0, 1.0, "note"), (0.5, 1.0, "note"), (1.0, 1.2, "note")],
)
def test_time_and_memory_that_differ_are_noted(slower: float, more: float, verdict: str) -> None:
    predicted = prediction(CONFIG, HARDWARE)
    sent = float(predicted.predicted_sent)
    seen = {"seconds": slower * predicted.predicted_s, "peak": more * predicted.predicted_peak, "sent": sent}
    result = judged(CONFIG, HARDWARE, [seen | {"peak": 1.0}, seen])
    assert result.verdict == verdict and result.detail.endswith("sent, as predicted")
    assert result.numbers["measured"] == seen and bool(result.advice) == (verdict == "note")
    wrong = judged(CONFIG, HARDWARE, [seen | {"sent": sent + 1}])
    assert wrong.verdict == "failed" and f"the predicted {int(sent):,}" in wrong.detail


def test_without_a_profile_it_is_only_measured() -> None:
    result = judged(CONFIG, None, [{"seconds": 0.5, "peak": 1e9, "sent": 2.0}])
    assert result.verdict == "ok"
    assert result.detail.startswith("500.0 ms, 1.02k tok/s per device; peak 1 GB")
    assert "no hardware profile" in result.detail


@pytest.mark.parametrize("processes", [1, 2, 3, 8, 16])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_usual_step_takes_all_processes(processes: int, device: str) -> None:
    assert usual(processes, device).parallel.world_size == processes
