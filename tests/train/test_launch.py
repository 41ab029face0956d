"""The launcher with real processes: failures, signals, and what the user sees."""

import contextlib
import json
import multiprocessing
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from boost.errors import BoostError, ConfigError, ExcludedError, StoppedError, StorageError, TrainingError
from boost.train import launch as launcher
from boost.train.failures import FailureReport, failure_report, read_reports, root_cause
from boost.train.launch import can_fork, launch, under_torchrun
from boost.train.rendezvous import meet
from boost.train.signals import STOP_SIGNALS, StopRequest
from boost.train.worker import LaunchSpec
from tests.train.commands import ForkedPython, alive

PATIENCE_S = 600.0
"""Only against hanging for ever."""


@pytest.fixture(autouse=True)
def outside_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


# What the processes do. Each runs in a process of its own, which imports this module if it is spawned.


def rank() -> int:
    return int(os.environ["RANK"])


def join() -> None:
    store, number, size = meet(PATIENCE_S)
    dist.init_process_group("gloo", store=store, rank=number, world_size=size)
    dist.barrier()


def sum_ranks(folder: Path) -> int:
    join()
    total = torch.tensor([rank() + 1.0])
    dist.all_reduce(total)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS")
    seen: dict[str, Any] = {name: os.environ[name] for name in names}
    seen |= {"sum": total.item(), "threads": torch.get_num_threads(), "torchrun": under_torchrun()}
    (folder / f"seen{rank()}.json").write_text(json.dumps(seen))
    os.write(1, f"printed by {rank()}\n".encode())  # sys.stdout of a process that pytest forks is pytest's
    dist.destroy_process_group()
    return 0


def raise_in_rank_1(kind: str) -> int:
    join()
    if rank() == 0:
        dist.all_reduce(torch.ones(1))  # never answered
    if kind == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ZeroDivisionError("a defect of ours")


def fail_before_the_group_exists() -> int:
    if rank() == 1:
        raise ConfigError("run.device = 'cuda', but torch sees no GPU")
    join()
    return 0


def train_until_told(folder: Path) -> int:
    """A loop like the trainer's: all processes stop once one has been told to."""
    join()
    with StopRequest() as request:
        (folder / f"pid{rank()}").write_text(str(os.getpid()))
        while True:
            stop = torch.tensor([float(request.requested)])
            dist.all_reduce(stop)
            if stop.item() > 0:
                break
            time.sleep(0.01)
        # As long as a save takes: the launcher's signal to this process may come after the other process has told it to stop.
        wait_for(lambda: request.requested, "the launcher signals every process")
    (folder / f"stopped{rank()}").write_text(f"{request.name}")
    dist.destroy_process_group()
    return 0


def finish_apart(folder: Path) -> int:
    """Rank 1 finishes immediately; rank 0 runs until it is told to stop."""
    with StopRequest() as request:
        (folder / f"pid{rank()}").write_text(str(os.getpid()))
        while rank() == 0 and not request.requested:
            time.sleep(0.01)
    return 0


def wait_in_a_collective(folder: Path) -> int:
    """Rank 0 blocks, where no Python signal handler runs, on a result that rank 1 never sends."""
    join()
    with StopRequest():
        (folder / f"pid{rank()}").write_text(str(os.getpid()))
        if rank() == 0:
            dist.all_reduce(torch.ones(1))
        while True:
            time.sleep(0.01)


def say_whether_terminal(folder: Path) -> int:
    (folder / f"tty{rank()}").write_text(f"{sys.stdout.isatty()} {sys.stderr.isatty()}")
    return rank() * torch.get_num_threads()


def main(entry: str, folder: str, nproc: str, grace: str) -> int:
    """The launcher in a separate process, for tests that send it signals."""
    path = Path(folder)
    return launch(globals()[entry], (path,), int(nproc), path / "logs", float(grace), forks=can_fork())


# Starting and watching them


def wait_for(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def pids(folder: Path) -> list[int]:
    texts = [path.read_text() for path in folder.glob("pid?")]
    return [int(text) for text in texts if text]


@contextlib.contextmanager
def launched(entry: Callable[..., int], folder: Path, grace: float = 30.0) -> Iterator[ForkedPython]:
    """A launcher whose two processes are at work. No process outlives the test."""
    process = ForkedPython(main, (entry.__name__, str(folder), "2", str(grace)), os.environ)
    try:
        wait_for(lambda: len(pids(folder)) == 2 or process.poll() is not None, "the processes did not start")
        assert process.poll() is None, process.communicate()
        yield process
    finally:
        process.close()
        for pid in pids(folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


# Success


@pytest.mark.parametrize("forks", [False, pytest.param(True, marks=pytest.mark.skipif(not can_fork(), reason="a GPU"))])
@pytest.mark.slow
def test_two_processes_share_the_cores_and_talk_to_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forks: bool
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(launcher, "available_cores", lambda: 4)
    handlers = [signal.getsignal(number) for number in (*STOP_SIGNALS, signal.SIGQUIT)]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert launch(sum_ranks, (tmp_path,), 2, tmp_path / "logs", forks=forks) == 0
    for number in range(2):
        ranks = {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "2"}
        seen = json.loads((tmp_path / f"seen{number}.json").read_text())
        assert seen == {**ranks, "sum": 3.0, "threads": 2, "torchrun": True}
    # The launcher leaves its own process as it was.
    assert "OMP_NUM_THREADS" not in os.environ
    assert [signal.getsignal(number) for number in (*STOP_SIGNALS, signal.SIGQUIT)] == handlers
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask
    # Rank 0 has the terminal, rank 1 a file.
    assert (tmp_path / "logs" / "rank1.out").read_text().count("printed by 1") == 1
    assert not (tmp_path / "logs" / "rank0.out").exists()


def test_zero_processes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^--nproc = 0 .* valid value: 1$"):
        launch(rank, (), 0, None)


@pytest.mark.slow
def test_rank_0_has_the_terminal_itself_and_a_code_that_is_not_0_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit code shows the number of threads, which is the user's if set."""
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    ends = pty.openpty()
    process = ForkedPython(
        main, (say_whether_terminal.__name__, str(tmp_path), "2", "30"), os.environ, os.ttyname(ends[1])
    )
    try:
        assert process.wait(PATIENCE_S) == 3
    finally:
        process.close()
        for end in ends:
            os.close(end)
    assert (tmp_path / "tty0").read_text() == "True True"
    assert (tmp_path / "tty1").read_text() == "False False"


HELD: list[Any] = []


def hold_a_semaphore() -> int:
    HELD.append(multiprocessing.get_context("spawn").Lock())
    return 0


@pytest.mark.slow
def test_what_a_spawned_process_leaves_behind_is_removed_without_a_warning() -> None:
    program = f"from {__name__} import *; launch(hold_a_semaphore, (), 1, None)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, "")


# Failure


def check_error(error: BaseException, capfd: pytest.CaptureFixture[str]) -> str:
    """The error is one line, without output from torch or other processes."""
    assert "\n" not in str(error)
    printed = capfd.readouterr()
    assert "Traceback" not in printed.err + printed.out
    assert "elastic" not in printed.err + printed.out
    return str(error)


@pytest.mark.slow
def test_an_error_for_the_user_is_the_one_that_comes_back(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While another process waits for the group."""
    monkeypatch.setattr(launcher, "FAILURE_GRACE_S", 0.5)
    with pytest.raises(ConfigError) as caught:
        launch(fail_before_the_group_exists, (), 2, tmp_path, forks=can_fork())
    assert check_error(caught.value, capfd) == "run.device = 'cuda', but torch sees no GPU"
    assert caught.value.exit_code == 2
    # For --debug, the traceback of the process goes along.
    assert "fail_before_the_group_exists" in caught.value.__notes__[0]


@pytest.mark.slow
def test_a_process_that_dies_without_a_word_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TrainingError) as caught:
        launch(raise_in_rank_1, ("sigkill",), 2, tmp_path, forks=can_fork())
    message = check_error(caught.value, capfd)
    assert message.startswith("process 2 of 2 (rank 1) was killed by SIGKILL")
    assert message.endswith(f"; resume with --resume auto; logs: {tmp_path}")
    assert caught.value.exit_code == 3
    with pytest.raises(TrainingError, match=r"^process 2 of 2 \(rank 1\) ended with exit code 9") as caught:
        launcher._raise_root_cause(call_of(tmp_path), {1: 9}, [], launcher._Signals())
    assert caught.value.exit_code == 3


@pytest.mark.slow
def test_a_defect_keeps_its_traceback_once_on_stderr_and_in_the_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch(raise_in_rank_1, ("defect",), 2, tmp_path, forks=can_fork()) == 1
    printed = capfd.readouterr()
    assert printed.err.count("Traceback") == 1
    assert printed.err.startswith("process 2 of 2 (rank 1) failed:\n")
    assert "ZeroDivisionError: a defect of ours" in printed.err
    assert "elastic" not in printed.err
    assert "ZeroDivisionError: a defect of ours" in (tmp_path / "rank1.log").read_text()


# Signals


@pytest.mark.slow
def test_a_signal_does_not_hurt_a_process_that_has_finished(tmp_path: Path) -> None:
    with launched(finish_apart, tmp_path) as process:
        time.sleep(0.5)  # rank 1 returns; whether before or after the signal, the outcome is the same
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, err


def stopped_before_the_start(folder: Path) -> int:
    start = launcher._run

    def run_after_signal(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return start(*args)

    launcher._run = run_after_signal
    try:
        return launch(train_until_told, (folder,), 2, None, forks=can_fork())
    except TrainingError as error:
        print(error)
        return error.exit_code


@pytest.mark.slow
def test_a_signal_before_the_processes_have_started_is_one_line(tmp_path: Path) -> None:
    process = ForkedPython(stopped_before_the_start, (tmp_path,), os.environ)
    out, err = process.communicate(PATIENCE_S)
    process.close()
    assert process.returncode == 128 + signal.SIGTERM, err
    assert out == "stopped by SIGTERM during startup or shutdown; existing checkpoints are intact\n"
    assert "Traceback" not in err
    assert not list(tmp_path.glob("stopped?"))


def test_a_signal_that_the_caller_has_caught_starts_no_process() -> None:
    """It may arrive after the caller's last look and before signals are forwarded."""
    with StopRequest():
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(StoppedError, match="SIGTERM"):
            launch(print, (), 2, None)


@pytest.mark.parametrize(("entry", "grace"), [(train_until_told, PATIENCE_S), (wait_in_a_collective, 1.0)])
@pytest.mark.slow
def test_no_process_outlives_a_launcher_that_is_killed(tmp_path: Path, entry: Callable[..., int], grace: float) -> None:
    with launched(entry, tmp_path, grace) as process:
        processes = pids(tmp_path)
        assert all(alive(pid) for pid in processes)
        process.kill()
        process.wait()
        wait_for(lambda: not any(alive(pid) for pid in processes), "processes were left behind")
    if entry is train_until_told:  # a loop that still turns saves and leaves
        assert (tmp_path / "stopped0").exists()
        assert (tmp_path / "stopped1").exists()


# Which of several failures is the one to show


def report(kind: str, when: float, rank: int = 0) -> FailureReport:
    return FailureReport(rank, kind, f"{kind} at {when}", "ConfigError", 2, "", when)


def test_the_root_cause_is_not_what_follows_from_it() -> None:
    lost, defect, ours, later = report("lost", 1.0), report("defect", 2.0), report("boost", 3.0), report("boost", 4.0)
    hung = report("hung", 5.0)
    assert root_cause({0: 2}, [lost, defect, ours, later]) is ours
    assert root_cause({0: 1}, [lost, hung, defect]) is defect
    assert root_cause({0: 3}, [lost, hung]) is hung
    assert root_cause({0: 3}, [lost]) is lost
    # A process without a report explains what others say, but not errors for the user.
    assert root_cause({0: -9}, []) == 0
    lost, defect, hung, ours = (report(kind, 1.0, rank=1) for kind in ("lost", "defect", "hung", "boost"))
    assert root_cause({0: -9, 1: 1}, [lost, defect, hung]) == 0
    assert root_cause({0: -9, 1: 2}, [lost, ours]) is ours


def test_an_excluded_replica_is_never_the_cause_of_what_excluded_it() -> None:
    excluded, lost = (
        failure_report(ExcludedError("no replica with weights is left"), rank=0),
        report("lost", 1.0, rank=1),
    )
    assert (excluded.kind, excluded.error, excluded.exit_code) == ("excluded", "ExcludedError", 3)
    for kind in ("boost", "defect", "hung"):
        assert root_cause({0: 3, 1: 3}, [excluded, cause := report(kind, 9e9, rank=1)]) is cause
    assert root_cause({0: 3, 1: -9}, [excluded]) == 1
    assert root_cause({0: 3, 1: 3}, [lost, excluded]) is excluded


def call_of(tmp_path: Path) -> LaunchSpec:
    return LaunchSpec(rank, (), 2, tmp_path, tmp_path, os.getpid(), 1.0, False)


class EndsUnseen:
    """A failed process that still appears to run the first two times its exit code is polled."""

    sentinel = 0

    def __init__(self, code: int) -> None:
        self._codes: list[int | None] = [None, None, code]

    @property
    def exitcode(self) -> int | None:
        return self._codes.pop(0) if len(self._codes) > 1 else self._codes[0]


def test_a_process_that_fails_between_two_looks_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher.connection, "wait", lambda *_: [])
    signals = launcher._Signals(processes={0: EndsUnseen(3), 1: EndsUnseen(0)})  # type: ignore[dict-item]
    assert launcher._supervise(call_of(tmp_path), signals) == {0: 3}


def test_exit_codes_and_classes_survive_the_way() -> None:
    for error in (TrainingError("the loss is not finite"), ConfigError("x"), OSError(28, "No space left", "/run")):
        said = failure_report(error, 1)
        with pytest.raises(BoostError) as caught:
            launcher._raise_root_cause(call_of(Path("logs")), {1: said.exit_code}, [said], launcher._Signals())
        expected = StorageError("/run: No space left") if isinstance(error, OSError) else error
        assert type(caught.value) is type(expected)
        assert str(caught.value) == str(expected)
        assert caught.value.exit_code == expected.exit_code


def test_a_lost_connection_without_a_cause_is_one_short_line(tmp_path: Path) -> None:
    text = "[/src/gloo/pair.cc:537] Read error [127.0.0.1]:33712: Connection reset by peer. This means more\nand more"
    said = failure_report(RuntimeError(text), 0)
    with pytest.raises(TrainingError) as caught:
        launcher._raise_root_cause(call_of(tmp_path), {0: 3}, [said], launcher._Signals())
    assert str(caught.value) == (
        "process 1 of 2 (rank 0) lost its connection to another process: Read error [127.0.0.1]:33712: Connection reset by peer; "
        f"resume with --resume auto; logs: {tmp_path}"
    )


def test_an_interrupt_that_ends_a_process_interrupts_the_command(tmp_path: Path) -> None:
    for code in (-signal.SIGINT, 128 + signal.SIGINT):
        with pytest.raises(KeyboardInterrupt):
            launcher._raise_root_cause(call_of(tmp_path), {0: code}, [], launcher._Signals([signal.SIGINT]))


def test_reports_are_read_by_time(tmp_path: Path) -> None:
    for number, when in enumerate([5.0, 2.0, 9.0]):
        one = FailureReport(number, "boost", "m", "ConfigError", 2, "", when)
        (tmp_path / f"report{number}.json").write_text(json.dumps(one.__dict__))
    assert [one.rank for one in read_reports(tmp_path)] == [1, 0, 2]


def test_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not under_torchrun()
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not under_torchrun()
    monkeypatch.setenv("RANK", "0")
    assert under_torchrun()


@pytest.mark.skipif(sys.platform != "linux", reason="processes are spawned elsewhere")
def test_a_torch_that_knows_gpus_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    for built in (False, True):
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda built=built: built)
        assert can_fork() == (not built)
