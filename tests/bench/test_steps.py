"""Steps on made-up tokens are steps of a run, and what is predicted of them is what they hold and send."""

from typing import Any

import pytest

from boost.bench import steps
from boost.plan.hardware import load_hardware
from tests import toy
from tests.distributed import run_distributed


def measured(cases: list[dict[str, Any]]) -> list[steps.Step]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "open_mesh", lambda *_: toy.mesh(tp=1, dp=2))
        patch.setattr(steps, "close_mesh", lambda: None)
        work = [(str(case), toy.toy_config("float32", **case)) for case in cases]
        return steps.measure_process(work, load_hardware("a100-80g"), rounds=2)


def test_bytes_are_exact_and_the_peak_is_near() -> None:
    model = {"vocab_size": 512, "dim": 64, "ffn_dim": 128, "layers": 2, "rank": 16}
    train = {"seq_len": 128, "micro_batch": 2, "global_batch": 4}
    cases = [
        {"model": model, "train": train, "parallel": parallel}
        for parallel in ({"tp": 2, "layout": "btp-sp"}, {"dp": 2, "layout": "single"}, {"pp": 2, "layout": "single"})
    ]
    rows = run_distributed(2, measured, cases)[0]
    for row in rows:
        assert row.counted_sent == row.predicted_sent > 0, row.name
        assert row.predicted_peak == pytest.approx(row.measured_peak, rel=0.1), row.name
        low, high = row.quartiles_s
        assert low <= row.measured_s <= high
        assert row.processes == 2
