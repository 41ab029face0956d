"""Measured steps match training steps, and predictions match their memory and communication."""

import json
from pathlib import Path
from typing import Any

import pytest

from boost.measure import steps
from boost.plan.hardware import load_hardware
from boost.plan.prediction import prediction
from boost.train.launch import launch
from tests import toy
from tests.distributed import run_distributed


def measured(cases: list[dict[str, Any]]) -> list[steps.MeasuredStep]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "open_mesh", lambda *_: toy.mesh(tp=1, dp=2))
        patch.setattr(steps, "close_mesh", lambda: None)
        work = [(str(case), toy.toy_config("float32", **case)) for case in cases]
        return steps.measure_process(work, load_hardware("a100-80g"), rounds=2)


@pytest.mark.slow
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


SHARE = {
    "model": {"vocab_size": 512, "dim": 64, "ffn_dim": 128, "layers": 2, "rank": 16},
    "train": {"seq_len": 128, "micro_batch": 2, "global_batch": 2},
    "parallel": {"tp": 4, "layout": "btp"},
    "run": {"device": "cpu"},
}


@pytest.mark.slow
def test_the_share_of_a_process_is_measured_without_the_others(tmp_path: Path) -> None:
    """Runs in a separate process, because the fake process group must be its only one."""
    out = tmp_path / "steps.json"
    work = [("share", toy.toy_config("float32", **SHARE))]
    assert launch(steps._measure_into, (work, load_hardware("a100-80g"), True, out), 1, log_dir=None) == 0
    (row,) = json.loads(out.read_text())
    assert (row["share"], row["processes"]) == (True, 4)
    assert row["counted_sent"] == row["predicted_sent"] > 0
    assert row["predicted_peak"] == pytest.approx(row["measured_peak"], rel=0.1)
    assert 0 < row["predicted_s"] < prediction(work[0][1], load_hardware("a100-80g")).predicted_s


def test_steps_that_do_not_fit_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """All models of a group are in memory together."""
    names = [name for name in steps.cases("cuda") if not name.startswith("share")]
    work = [(name, steps.case(name, "cuda")) for name in names]
    hardware = load_hardware("h100-80g")
    kept = dict(steps.fitting(work, hardware))
    states, peaks = zip(*(steps._memory(config, hardware) for config in kept.values()), strict=True)
    assert max(sum(states) - own + peak for own, peak in zip(states, peaks, strict=True)) <= hardware.usable_bytes
    small = hardware.model_copy(update={"memory_gb": 24.0})
    fewer = dict(steps.fitting(work, small))
    assert "cola 1B" in fewer and "dense 7B" not in fewer and len(fewer) < len(kept)
    assert "dense 7B: skipped" in capsys.readouterr().out


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_configurations_are_legal_and_of_many_kinds(device: str) -> None:
    configs = [steps.case(name, device) for name in steps.cases(device)]
    assert len(configs) >= 12
    assert {"btp", "btp-sp", "vanilla", "megatron-sp"} <= {config.parallel.layout for config in configs}
    assert sorted(name for _, _, names in steps._groups(device) for name in names) == sorted(steps.cases(device))
