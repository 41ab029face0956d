"""Full runs that `boost verify` starts. `cli/test_verify.py` runs the checks themselves."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from boost.config import load
from boost.measure.verify import runs
from boost.measure.verify.report import Report
from tests.train.commands import ForkedPython


def verify_a_run_that_sleeps(pid: Path) -> int:
    def first(trial: runs._Trial) -> Any:
        with trial._started("first") as process:
            pid.with_suffix(".new").write_text(str(process.pid))
            pid.with_suffix(".new").rename(pid)
            time.sleep(600)

    popen = subprocess.Popen
    mock.patch.object(runs._Trial, "first", first).start()
    mock.patch.object(runs.subprocess, "Popen", lambda command, **options: popen(["sleep", "600"], **options)).start()
    runs.verify(Report(), load(None).model, 1, "cpu")
    return 0


@pytest.mark.slow
def test_sigterm_ends_the_run_in_progress_too(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    with contextlib.closing(ForkedPython(verify_a_run_that_sleeps, [pid], os.environ)) as verify:
        while not pid.exists():
            assert verify.poll() is None, verify.communicate()
            time.sleep(0.01)
        started = int(pid.read_text())
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
