"""`boost runs list`."""

import json
from pathlib import Path

from boost.train.metrics import RunEnd
from tests.cli.commands import Capture, refused, say
from tests.measure.made_runs import make_run


def test_list(tmp_path: Path, capsys: Capture) -> None:
    first = make_run(tmp_path / "a-run-with-a-long-name")
    make_run(tmp_path / "b", steps=10, end=RunEnd(10, "stopped", "SIGTERM"))
    with open(make_run(tmp_path / "more/c", steps=7) / "metrics.jsonl", "a") as file:
        file.write('{"kind": \n{"kind": "step", "step": 8, "lo')
    code, out, _ = say(capsys, "runs", "list", tmp_path)
    lines = out.splitlines()
    assert code == 0 and len(lines) == 4
    assert [line.split()[1:3] for line in lines[1:]] == [["done", "20/20"], ["stopped", "10/20"], ["failed", "7/20"]]
    assert "held-out" in lines[0] and "more/c" in lines[3]
    code, out, _ = say(capsys, "runs", "list", tmp_path, "--json")
    rows = json.loads(out)
    assert [(row["state"], row["step"], row["reason"]) for row in rows] == [
        ("done", 20, ""),
        ("stopped", 10, "SIGTERM"),
        ("failed", 7, ""),
    ]
    assert rows[0]["run"] == str(first) and rows[2]["damaged_lines"] == 1 and rows[0]["updated"].endswith("+00:00")


def test_a_folder_without_runs_is_one_line(capsys: Capture) -> None:
    assert "no runs in 'nowhere'" in refused(capsys, "runs", "list", "nowhere")
