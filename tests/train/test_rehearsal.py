"""Faults on whole runs: the hanging process is named, with and without our launcher, before the whole timeout has passed."""

import contextlib
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from boost.train.heartbeat import Phase
from tests.train.commands import QUIET, Command, free_ports, saved_steps

pytestmark = pytest.mark.slow


def test_a_process_that_hangs_is_named_with_operation_and_step(store: Path, tmp_path: Path) -> None:
    words = (*QUIET, "--run.timeout_s", "8", "--inject-fault", "hang@10:1")
    with Command(tmp_path, store, *words) as command:
        code, _, err = command.finish()
    assert code == 3, err
    assert "injected fault: hang" in (command.run / "logs" / "rank1.log").read_text()
    (line,) = (line for line in err.splitlines() if "error" in line)
    assert re.fullmatch(
        r"boost: error: process 2 of 2 \(rank 1\) is not responding \(last seen in step \d+, phase step.*\); "
        r"process 1 of 2 \(rank 0\) waited 8 s in step 10, phase step, in \w+ #\d+ of group '(all|tp)' \(\d+ bytes\); "
        r"resume with --resume auto; logs: .*",
        line,
    )
    assert "Traceback" not in err


def stopped(command: Command) -> bool:
    """Whether one of its processes is stopped."""
    states = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in command.processes()]
    return "T" in states


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_hang_ends_the_run_within_its_timeout_and_ten_seconds(store: Path, tmp_path: Path) -> None:
    """The only test with a time bound; needs an idle machine."""
    with Command(tmp_path, store, *QUIET, "--run.timeout_s", "10", "--inject-fault", "hang@10:1") as command:
        command.wait_for(lambda: stopped(command))
        begin = time.monotonic()
        code, _, err = command.finish()
        seconds = time.monotonic() - begin
    assert code == 3 and "process 2 of 2 (rank 1) is not responding" in err
    print(f"ended {seconds:.1f} s after the hang")
    assert 10 <= seconds <= 20


@pytest.mark.nightly
def test_a_run_that_is_suspended_as_a_whole_blames_no_process(store: Path, tmp_path: Path) -> None:
    """When it resumes, one process has waited for the other for longer than the timeout."""
    words = (*QUIET, "--train.log_every", "1", "--run.timeout_s", "18", "--inject-fault", "slow@5:1")
    with Command(tmp_path, store, *words) as command:
        metrics = command.run / "metrics.jsonl"
        command.wait_for(lambda: metrics.exists() and '"step": 4,' in metrics.read_text())
        for number, seconds in ((signal.SIGSTOP, 20), (signal.SIGCONT, 0)):
            for pid in command.processes():
                os.kill(pid, number)
            time.sleep(seconds)
        code, _, err = command.finish()
    assert code == 3 and "boost: error: all 2 processes were stopped for about " in err, err


def without_agent(folder: Path, store: Path, rank: int, port: int, *words: str) -> Command:
    """One process of two, started by hand."""
    variables = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    return Command(folder, store, *QUIET, *words, **variables, **address)


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    text = Path(f"/proc/{pid}/status").read_text()
    caught = next(int(line.split()[1], 16) for line in text.splitlines() if line.startswith("SigCgt"))
    return bool(caught >> number - 1 & 1)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("alone", [pytest.param(True, marks=pytest.mark.nightly), False])
def test_a_signal_in_start_up_without_an_agent_reaches_who_waits(store: Path, tmp_path: Path, alone: bool) -> None:
    """The first process waits for a missing second one, or is stopped during its own startup."""
    (port,) = free_ports(1)
    with without_agent(tmp_path, store, 0, port) as first:
        if alone:
            first.wait_for(lambda: catches(first.process.pid, signal.SIGTERM))
            first.process.send_signal(signal.SIGTERM)
        else:
            with without_agent(tmp_path, store, 1, port) as second:
                second.wait_for(lambda: catches(second.process.pid, signal.SIGTERM))
                second.process.send_signal(signal.SIGTERM)
                code, out, err = second.finish()
                assert (code, "Traceback" in err) == (0, False), err
        code, out, err = first.finish()
    assert code == 0, err
    assert "Traceback" not in err
    assert "stopped by SIGTERM during startup, before the first step; nothing was lost" in out or saved_steps(
        tmp_path / "run"
    ) == [0]


@pytest.mark.nightly
@pytest.mark.parametrize("stopped", [0, 1])
def test_without_an_agent_too_the_process_that_hangs_is_named(store: Path, tmp_path: Path, stopped: int) -> None:
    """Process 1 hosts the store, which is unresponsive while the process is stopped."""
    (port,), words = free_ports(1), ("--run.timeout_s", "5", "--inject-fault", f"hang@10:{stopped}")
    first = without_agent(tmp_path, store, 0, port, *words)
    second = without_agent(tmp_path, store, 1, port, *words)
    with first, second:
        code, _, err = (second if stopped == 0 else first).finish()
        assert code == 3
        name = f"process {stopped + 1} of 2 (rank {stopped})"
        hosts = ", which hosts the run's store," if stopped == 0 else ""
        assert f"boost: error: {name}{hosts} is not responding" in err
        assert "Traceback" not in err


def test_a_closed_terminal_saves(store: Path, tmp_path: Path) -> None:
    """Its processes can no longer print, and the launcher receives SIGHUP."""
    terminal, other_end = os.openpty()
    os.set_blocking(terminal, False)
    with Command(tmp_path, store, *QUIET, output=os.ttyname(other_end), TERM="dumb") as command:

        def trains() -> bool:
            with contextlib.suppress(BlockingIOError):
                os.read(terminal, 65536)
            return Phase.STEP in command.phases()

        command.wait_for(trains)
        os.close(other_end)
        os.close(terminal)
        assert command.process.wait() == 0
    assert len(saved_steps(command.run)) == 1
