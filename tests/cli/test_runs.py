"""`boost runs`: list, compare."""

import json
from pathlib import Path

import pytest

from boost.train.metrics import RunEnd
from tests.cli.commands import say
from tests.measure.made_runs import make_run


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    made = [
        make_run(tmp_path / "runs/a-run-with-a-long-name", "--model.family", "svd"),
        make_run(tmp_path / "runs/b", "--optim.lr", "0.5", steps=10, floor=2.5, end=RunEnd(10, "stopped", "SIGTERM")),
        make_run(
            tmp_path / "runs/more/c", "--train.sample_tokens", "3", "--train.sample_prompts", '["[red]x"]', steps=7
        ),
    ]
    with open(made[2] / "metrics.jsonl", "a") as file:
        file.write('{"kind": \n{"kind": "step", "step": 8, "lo')
    return made


def test_list(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = say(capsys, "runs", "list", runs[0].parent)
    lines = out.splitlines()
    assert code == 0 and len(lines) == 4
    assert [line.split()[1:3] for line in lines[1:]] == [["done", "20/20"], ["stopped", "10/20"], ["failed", "7/20"]]
    assert "held-out" in lines[0] and "more/c" in lines[3]
    code, out, _ = say(capsys, "runs", "list", runs[0].parent, "--json")
    rows = json.loads(out)
    assert [(row["state"], row["step"], row["reason"]) for row in rows] == [
        ("done", 20, ""),
        ("stopped", 10, "SIGTERM"),
        ("failed", 7, ""),
    ]
    assert rows[0]["run"] == str(runs[0]) and rows[2]["damaged_lines"] == 1 and rows[0]["updated"].endswith("+00:00")


def test_compare(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = say(capsys, "runs", "compare", *runs)
    plain = [line for line in out.splitlines() if "runs/" not in line]
    assert code == 0
    rows = {line.rsplit(None, 3)[0]: line.split()[-3:] for line in plain if len(line.split()) >= 4}
    assert rows["steps"] == ["20/20", "10/20", "7/20"] and rows["state"] == ["done", "stopped", "failed"]
    assert rows["tokens"] == ["1.28k", "640", "448"]
    assert rows["optim.lr"][1] == "0.5" and rows["model.family"] == ["svd", "cola", "cola"]
    assert "['[red]x']" in out and "train.steps" not in out
    assert f"B  {runs[1]}: stopped (SIGTERM)" in out and "1 damaged line of" in out
    _, loss, heldout = out.replace("\nheldout loss", "\nloss").split("\nloss by step\n")
    values = dict(line.split(None, 1) for line in loss.splitlines() if line[:1].isdigit())
    assert list(values) == [str(step) for step in range(2, 21, 2)] and values["2"].split()[0] == "4.5000"
    assert values["20"].split()[1:] == ["-", "-"], "these runs are shorter"
    assert [line.split()[:2] for line in heldout.splitlines()[1:4]] == [["2", "-"], ["4", "-"], ["6", "3.5000"]]


def test_compare_as_json(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = say(capsys, "runs", "compare", *runs[:2], "--json", "--metric", "lr")
    found = json.loads(out)
    assert code == 0 and [row["step"] for row in found["runs"]] == [20, 10]
    assert found["config"]["optim.lr"][1] == 0.5 and list(found["curves"]) == ["lr"]
    assert found["curves"]["lr"]["B"] == [[step, 1e-3] for step in range(1, 11)]


def test_runs_that_have_not_begun_and_equal_configurations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = [make_run(tmp_path / name, steps=0) for name in ("a", "b")]
    code, out, _ = say(capsys, "runs", "compare", *made)
    assert code == 0 and "The configurations are identical." in out and "by step" not in out


def test_a_metric_that_no_run_has_is_one_line(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = say(capsys, "runs", "compare", *runs, "--metric", "heldout_los")
    assert code == 2 and err.count("\n") == 1 and "--metric = 'heldout_los' is in no metrics.jsonl" in err
    assert "heldout_loss" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["compare", "A"], "RUN: 1 given; nearest valid number of runs to compare: 2"),
        (["compare", *"ABCDEFGHIJK"], "RUN: 11 given; nearest valid number of runs to compare: 10"),
        (["compare", "nowhere", "B"], "'nowhere' is not a run directory"),
        (["list", "nowhere"], "no runs in 'nowhere'"),
    ],
)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    code, _, err = say(capsys, "runs", *words)
    assert code == 2 and err.count("\n") == 1 and message in err
