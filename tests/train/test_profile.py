"""Step profiles: written once, complete even if the run ends early."""

import json
import re
from pathlib import Path

from boost.train.hooks import Hook
from tests.distributed import run_distributed
from tests.train.runs import Do, fitted, make_config, request_stop


def operations(file: Path) -> list[str]:
    return [event["name"] for event in json.loads(file.read_text())["traceEvents"] if event.get("cat") == "cpu_op"]


def profiled(store: Path, run: Path, *hooks: Hook, profile: list[int], tp: int = 1) -> Path:
    trainer = fitted(make_config(store, run, tp, train={"profile": profile, "save_every": 0}), *hooks)
    return run / "profile" / f"rank{trainer.mesh.rank}.json"


def test_it_covers_the_steps_asked_for_also_where_a_run_stops_earlier(store: Path, tmp_path: Path) -> None:
    one = profiled(store, tmp_path / "one", profile=[2, 2])
    two = profiled(store, tmp_path / "two", Do("after_step", 2, request_stop), profile=[2, 5])  # stops after step 3
    counts = [operations(file).count("aten::mm") for file in (one, two)]
    assert counts[1] == 2 * counts[0] > 0
    assert not profiled(store, tmp_path / "late", profile=[100, 101]).exists()


def profiled_on_two(store: Path, run: Path) -> tuple[list[str], list[str]]:
    file = profiled(store, run, profile=[2, 2], tp=2)
    names = [event.get("name", "") for event in json.loads(file.read_text())["traceEvents"]]
    return operations(file), names


def test_collectives_are_in_it(store: Path, tmp_path: Path) -> None:
    """With the notes by which `python -m benchmarks timeline` tells when a collective is in flight."""
    for operators, names in run_distributed(2, profiled_on_two, store, tmp_path):
        assert "boost::all_reduce" in operators and "_c10d_functional::wait_tensor" in operators
        assert {name for name in names if re.fullmatch(r"step \d+", name)} == {"step 2"}
        started, waited = (
            {match[1] for name in names if (match := re.fullmatch(rf"{word} (\w+ #\d+ of .*), \d+ bytes", name))}
            for word in ("start", "wait for")
        )
        assert started and waited <= started
