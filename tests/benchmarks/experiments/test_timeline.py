"""The picture and the numbers of a recorded step."""

import json
from pathlib import Path

import pytest

from benchmarks.commands import main
from benchmarks.experiments.step_trace import Interval, ProcessStep
from benchmarks.experiments.timeline import as_numbers, from_numbers, rows


def recorded_run(folder: Path) -> Path:
    step = {"ph": "X", "cat": "user_annotation", "name": "step 3", "ts": 0.0, "dur": 50e3}
    work = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 20e3}
    (folder / "profile").mkdir(parents=True)
    for rank in range(2):
        (folder / "profile" / f"rank{rank}.json").write_text(json.dumps({"traceEvents": [step, work]}))
    return folder


@pytest.mark.slow
def test_it_draws_and_says_what_was_hidden(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    run = recorded_run(tmp_path / "run")
    assert main(["timeline", str(run)]) == 0
    out = capsys.readouterr().out
    assert "step 3" in out and out.count("100%") == 2
    assert (run / "profile" / "timeline.svg").stat().st_size > 1000
    assert main(["timeline", str(run), "--step", "3", "--out", str(tmp_path / "pictures" / "one.png")]) == 0
    assert (tmp_path / "pictures" / "one.png").read_bytes().startswith(b"\x89PNG")


STEP = ProcessStep(1, Interval(10.0, 10.1), (Interval(10.0, 10.03), Interval(10.055, 10.08)), (Interval(10.02, 10.09),))


def test_numbers_of_a_step() -> None:
    assert list(rows([STEP])) == [("1", "100.0", "55.0", "70.0", "35.0", "50%")]
    again = from_numbers(json.loads(json.dumps(as_numbers(STEP))))
    assert list(rows([again])) == list(rows([STEP]))
