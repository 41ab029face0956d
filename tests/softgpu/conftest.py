"""Every test of this folder runs once for each version of torch that `make softgpu` has set up."""

import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.softgpu.run import Run, differences, environment, homes, processes_of

LIMIT_S = 3600
"""Only prevents endless hangs."""


@pytest.fixture(params=homes(), ids=lambda home: home.name)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    """Runs a command of the environment of `make softgpu`, emulated or not, and returns its output. It must exit with 0
    and leave no process, and all processes must have issued the same collectives."""

    def command(*words: str | Path, emulated: bool = True, stop: bytes = b"") -> str:
        """`stop`: send SIGTERM once this is in the output."""
        log = tmp_path / "log"
        with environment(request.param, emulated) as (shared, variables), log.open("wb") as out:
            process = subprocess.Popen(words, env=variables, stdout=out, stderr=subprocess.STDOUT, cwd=tmp_path)
            try:
                while stop and process.poll() is None and stop not in log.read_bytes():
                    time.sleep(0.1)
                if stop:
                    process.send_signal(signal.SIGTERM)
                assert process.wait(LIMIT_S) == 0, log.read_text()[-5000:]
                ends = time.monotonic() + 30  # multiprocessing's trackers end after the processes that they serve
                while processes_of(shared) and time.monotonic() < ends:
                    time.sleep(0.1)
                assert processes_of(shared) == []
                assert differences(shared) == []
            finally:
                process.kill()
        return log.read_text()

    return command
