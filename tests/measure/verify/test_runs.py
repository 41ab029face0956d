"""Full runs that `boost verify` starts. `cli/test_verify.py` runs the checks themselves."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from boost.config import load
from boost.measure.verify import runs

PROGRAM = """
import subprocess, time
from boost.config import load
from boost.measure.verify import runs
from boost.measure.verify.report import Report

def first(trial):
    with trial._started("first") as process:
        print(process.pid, flush=True)
        time.sleep(600)

popen, runs._Trial.first = subprocess.Popen, first
runs.subprocess.Popen = lambda command, **options: popen(["sleep", "600"], **options)
runs.verify(Report(), load(None).model, 1, "cpu")
"""


@pytest.mark.slow
def test_sigterm_ends_the_run_in_progress_too() -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as verify:
        assert verify.stdout is not None
        started = int(next(line for line in verify.stdout if line.strip().isdecimal()))
        os.kill(started, 0)
        verify.send_signal(signal.SIGTERM)
        assert verify.wait(60) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(started, 0)


@pytest.mark.parametrize(("device", "expected"), [("cpu", "5"), ("cuda", "30")])
def test_on_gpus_a_process_that_compiles_has_more_time(
    device: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the one that compiles last would be reported instead of the one that hangs."""
    trial, started = runs._Trial(tmp_path, load(None).model, 2, device), list[str]()
    (tmp_path / "hangs").mkdir()
    (tmp_path / "hangs" / "metrics.jsonl").touch()

    def train(name: str, *words: str) -> tuple[int, str]:
        started.extend(words)
        return 3, "process 2 of 2 (rank 1) is not responding"

    monkeypatch.setattr(trial, "_train", train)
    monkeypatch.setattr(runs, "choose_device", lambda device: torch.device(device))
    assert trial.hangs().verdict == "ok"
    assert started[-2:] == ["--run.timeout_s", expected]
