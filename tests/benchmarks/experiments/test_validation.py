"""The validation stores measurements, recomputes predictions, and finds errors beyond their limits."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.commands import main, result_of
from benchmarks.experiments import validation
from benchmarks.experiments.published import launching
from benchmarks.experiments.validation import GPU, MACHINE, MeasuredStep
from boost.config.load import from_tree
from boost.measure.steps import prediction
from boost.plan.hardware import Hardware, load_hardware
from boost.train.launch import can_fork
from tests import toy
from tests.distributed import run_distributed

A100 = load_hardware("a100-80g")
CPU = A100.model_copy(update={"device": "cpu", "title": "two cores"})


def measured(hardware: Hardware, count: int = 12, slower: float = 1.05) -> list[MeasuredStep]:
    """Steps that take slightly longer than predicted, and use slightly more memory."""
    result = []
    for number in range(count):
        tp = 1 + number % 2
        config = toy.toy_config("float32", parallel={"tp": tp, "layout": "btp"}, model={"layers": 1 + number // 2})
        ours = prediction(from_tree(config.model_dump()), hardware)
        seconds = slower * ours.predicted_s
        step = {
            "name": f"btp, {1 + number // 2} blocks", "processes": tp, "config": config.model_dump(), "share": False,
            "measured_s": seconds, "raw_s": 1.1 * seconds, "quartiles_s": (0.99 * seconds, 1.02 * seconds),
            "measured_peak": int(1.02 * ours.predicted_peak), "counted_sent": ours.predicted_sent,
        }  # fmt: skip
        result.append(MeasuredStep(**step, **asdict(ours)))
    return result


def rows(hardware: Hardware = CPU, **kwargs: Any) -> list[dict[str, Any]]:
    return [asdict(step) for step in measured(hardware, **kwargs)]


def measure_with(monkeypatch: pytest.MonkeyPatch, out: Path, hardware: Hardware, **kwargs: Any) -> dict[str, Any]:
    monkeypatch.setattr(validation, "measure", lambda _: measured(hardware, **kwargs))
    monkeypatch.setattr(validation, "load_hardware", lambda _: hardware)
    assert main(["validation", "--measure", "--hardware", "local.toml", "--out", str(out)]) == 0
    facts: dict[str, Any] = json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))
    return facts


def test_measurements_on_other_devices_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "validation"
    first = measure_with(monkeypatch, out, CPU)
    assert first[GPU] is None
    second = measure_with(monkeypatch, out, A100, count=2)
    assert len(second[MACHINE]["rows"]) == 12 and len(second[GPU]["rows"]) == 2
    verdicts = list(validation.verdicts(second))
    assert [v.what for v in verdicts] == ["time", "memory", "bytes sent"] * 2 and all(v.holds for v in verdicts)


def test_predictions_are_made_again_from_the_stored_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "validation"
    measure_with(monkeypatch, out, CPU)
    path = out.with_suffix(".json")
    kept = json.loads(path.read_text(encoding="utf-8"))
    for row in kept[MACHINE]["rows"]:
        row |= {"predicted_s": 1e9, "predicted_peak": 1, "predicted_sent": 1}
    path.write_text(json.dumps(kept), encoding="utf-8")
    assert main(["validation", "--out", str(out)]) == 0
    kept[MACHINE]["hardware"]["host_us"]["none"] *= 3  # another profile changes the prediction, not the measurement
    path.write_text(json.dumps(kept), encoding="utf-8")
    assert main(["validation", "--out", str(out)]) == 1
    wrong = {v.what: v.holds for v in validation.verdicts(json.loads(path.read_text()))}
    assert wrong == {"time": False, "memory": True, "bytes sent": True}


def of(found: list[dict[str, Any]], name: str = MACHINE) -> list[validation.Verdict]:
    return list(validation.verdicts({MACHINE: None, GPU: None, name: {"rows": found}}))


@pytest.mark.parametrize(
    ("key", "factor", "what"),
    [("measured_s", 1.2, "time"), ("measured_peak", 1.15, "memory"), ("counted_sent", 1.001, "bytes sent")],
)
def test_one_error_beyond_its_limit_is_found(key: str, factor: float, what: str) -> None:
    found = rows()
    found[3][key] = found[3][key] * factor
    assert {v.what for v in of(found) if not v.holds} == {what}


def test_bytes_that_were_not_predicted_are_found() -> None:
    found = rows()
    assert found[0]["counted_sent"] == 0
    found[0]["predicted_sent"] = 8
    assert [v.holds for v in of(found)] == [True, True, False]


def test_a_dozen_configurations_are_asked_for_on_cpus() -> None:
    few = rows(count=11)
    assert not any(v.holds for v in of(few))
    assert all(v.holds for v in of(few, GPU))


SMALL = {
    "model": {"vocab_size": 512, "dim": 64, "ffn_dim": 128, "layers": 2, "rank": 16},
    "train": {"seq_len": 128, "micro_batch": 2, "global_batch": 4, "compile": "none"},
}


def measured_cases(cases: list[dict[str, Any]]) -> list[validation.MeasuredStep]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validation, "open_mesh", lambda *_: toy.mesh(tp=1, dp=2))
        patch.setattr(validation, "close_mesh", lambda: None)
        work = [(str(case), toy.toy_config("float32", **case)) for case in cases]
        return validation.measure_process(work, load_hardware("a100-80g"), rounds=2)


@pytest.mark.slow
def test_bytes_are_exact_and_the_peak_is_near() -> None:
    meshes = ({"tp": 2, "layout": "btp-sp"}, {"dp": 2, "layout": "single"}, {"pp": 2, "layout": "single"})
    cases = [{**SMALL, "parallel": parallel} for parallel in meshes]
    rows = run_distributed(2, measured_cases, cases)[0]
    for row in rows:
        assert row.counted_sent == row.predicted_sent > 0, row.name
        assert row.predicted_peak == pytest.approx(row.measured_peak, rel=0.1), row.name
        low, high = row.quartiles_s
        assert low <= row.measured_s <= high
        assert row.processes == 2


@pytest.mark.slow
def test_the_share_of_a_process_is_measured_without_the_others() -> None:
    """Runs in a separate process, because the fake process group must be its only one."""
    work = [("share", toy.toy_config("float32", **SMALL, parallel={"tp": 4, "layout": "btp"}, run={"device": "cpu"}))]
    hardware = load_hardware("a100-80g").model_copy(update={"host_us": launching(0.0)})
    (row,) = result_of(validation.measured, (work, hardware, True), 1, forks=can_fork())
    assert (row["share"], row["processes"]) == (True, 4)
    assert row["counted_sent"] == row["predicted_sent"] > 0
    assert row["predicted_peak"] == pytest.approx(row["measured_peak"], rel=0.1)
    assert 0 < row["predicted_s"] < prediction(work[0][1], hardware).predicted_s


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_configurations_are_legal_and_of_many_kinds(device: str) -> None:
    configs = [validation.case(name, device) for name in validation.cases(device)]
    assert len(configs) >= 12
    assert {"btp", "btp-sp", "vanilla", "megatron-sp"} <= {config.parallel.layout for config in configs}
    names = [name for _, _, names in validation._groups(device) for name in names]
    assert sorted(names) == sorted(validation.cases(device))
