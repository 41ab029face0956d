"""Full runs that `boost verify` starts. `cli/test_verify.py` runs the checks themselves."""

import os
import signal
import subprocess
import sys

import pytest

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
