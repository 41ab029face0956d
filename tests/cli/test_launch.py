"""`boost launch`: checked before torchrun starts, one error, exit codes, and signals during a save."""

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import DistNetworkError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousTimeoutError
from torch.distributed.launcher import api

from boost.cli.main import main
from boost.errors import BoostError
from boost.train.agent import Agent
from boost.train.signals import STOP_SIGNALS
from tests.cli.commands import Capture, say
from tests.train.commands import LIMIT_S, ForkedPython, alive, boost_command, saved_steps, toml


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """`boost launch` ends with its stop signals ignored."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


TORCHRUN = ("--standalone", "--monitor-interval", "0.1")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("-- train demo --optim.lrr 1", "unknown key 'optim.lrr'; did you mean 'optim.lr'?"),
        ("-- train demo --data.store /nowhere", "/nowhere: no token store here"),
        ("-- verify nothing.toml", "nothing.toml"),
        ("-- trian demo", "unknown command 'trian'; did you mean 'train'?"),
        ("--nproc-per-node 2", "-- and a command are missing"),
        ("--", "-- and a command are missing"),
        ("--nproc-per-node 2 twice -- verify", "'twice' is not an option of torchrun"),
    ],
)
def test_a_mistake_is_one_line_before_any_process_starts(
    words: str, error: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.distributed.run.run", lambda _: pytest.fail("torchrun was started"))
    before = signal.getsignal(signal.SIGTERM)
    code, out, err = say(capsys, "launch", *words.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("boost: error: ") and error in err
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal_before_the_processes_start_asks_for_another_try(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("boost.train.agent.torchrun", lambda *_: os.kill(os.getpid(), signal.SIGUSR1))
    code, _, err = say(capsys, "launch", "--", "verify")
    assert code == 75 and "stopped by SIGUSR1 before the processes started" in err


def test_the_launched_command_is_torchruns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags of both sides reach their owner, and SIGUSR1 is forwarded unless the options say otherwise."""
    seen: list[Any] = []
    monkeypatch.setattr("torch.distributed.run.run", seen.append)
    for options in ("--nnodes 2", "--nnodes 2 --signals-to-handle SIGTERM"):
        assert main(["launch", *options.split(), "--", "verify", "--only", "links", "--run.device=cpu"]) == 0
    for args, signals in zip(seen, ("SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1", "SIGTERM"), strict=True):
        assert (args.nnodes, args.module, args.training_script) == ("2", True, "boost.cli.main")
        assert args.training_script_args == ["verify", "--only", "links", "--run.device=cpu"]
        assert args.signals_to_handle == signals


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (SignalException("", signal.SIGTERM), 75, ""),
        (
            RendezvousTimeoutError("nobody else came"),
            3,
            "the nodes lost each other or did not meet at one:29400: nobody",
        ),
        (DistNetworkError("refused"), 3, "the nodes lost each other or did not meet at one:29400: refused"),
        (socket.gaierror(-2, "Name or service not known"), 3, "network: Name or service not known"),
    ],
)
def test_nodes_that_do_not_meet(
    error: Exception, code: int, message: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Any) -> None:
        raise error

    monkeypatch.setattr("torch.distributed.run.run", fail)
    found, _, err = say(capsys, "launch", "--nnodes", "2", "--rdzv-endpoint", "one:29400", "--", "verify")
    assert (
        found == code and err.startswith(f"boost: error: {message}" if message else "") and bool(err) == bool(message)
    )


@pytest.mark.parametrize(
    ("codes", "code", "message"),
    [
        ({0: (3, "lost", 1), 1: (2, "typo", 9)}, 2, "typo"),
        ({0: (3, "lost", 1), 2: (-9, "", 0)}, 3, "process 3 of 4 (rank 2) was killed by SIGKILL (out of memory?)"),
        ({0: (3, "lost", 1), 1: (1, "", 0)}, 1, "process 2 of 4 (rank 1) ended with exit code 1"),
        ({0: (3, "second", 2), 1: (3, "first", 1), 2: (-15, "", 0), 3: (75, "", 0)}, 3, "first"),
        ({0: (75, "", 0), 1: (-15, "", 0)}, 75, "a signal to another node stopped the run"),
    ],
)
def test_the_root_cause_is_printed(
    codes: dict[int, tuple[int, str, float]], code: int, message: str, tmp_path: Path
) -> None:
    failures = {}
    for rank, (exit_code, text, at) in codes.items():
        report = tmp_path / str(rank)
        if text:
            report.write_text(f'{{"message": "{text}", "timestamp": {at}}}')
        failures[rank] = ProcessFailure(rank, 1, exit_code, str(report))
    agent: Any = Agent.__new__(Agent)
    agent._worker_group = SimpleNamespace(workers=[SimpleNamespace(world_size=4)])
    error = agent.root_cause(failures)
    assert (error.exit_code, str(error)) == (code, message)


def test_a_process_that_torch_kills_after_a_hang_is_not_the_cause(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """torch lists the process that hangs and does not react to SIGTERM like those that failed before."""
    hang = ProcessFailure(0, 1, 3, "")
    hang.error_file_data, hang.message = {"timestamp": 1}, "process 2 of 2 (rank 1) is not responding"
    listed = {0: hang, 1: ProcessFailure(1, 2, -signal.SIGKILL, "")}
    monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", lambda *_: RunResult(WorkerState.FAILED, {}, listed))
    agent, group = agent_of(0, 1), SimpleNamespace(group_world_size=1, spec=SimpleNamespace(monitor_interval=0.1))
    for ended, cause in (({0: hang}, hang.message), (listed, "process 2 of 2 (rank 1) was killed by SIGKILL")):
        monkeypatch.setattr(agent, "failures", lambda ended=ended: ended)
        with pytest.raises(BoostError, match=re.escape(cause)) as error:
            agent._monitor_workers(group)
        assert error.value.exit_code == 3


def agent_of(*codes: int | None) -> Any:
    """An agent whose processes have these exit codes (None: they run)."""
    agent: Any = Agent.__new__(Agent)
    workers = [SimpleNamespace(global_rank=rank, world_size=len(codes)) for rank in range(len(codes))]
    agent._worker_group = SimpleNamespace(workers=workers, state=WorkerState.HEALTHY)
    handlers = {
        rank: SimpleNamespace(proc=SimpleNamespace(poll=lambda c=c, **_: c, pid=1)) for rank, c in enumerate(codes)
    }
    agent._pcontext = SimpleNamespace(subprocess_handlers=handlers, error_files=dict.fromkeys(handlers, ""))
    agent._remaining_restarts, agent._store = 0, None
    return agent


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], threading.Event]:
    """The exit codes of a launcher that would end, which happens without long waits, and an event that its end sets."""
    codes, ended = list[int](), threading.Event()

    def leave(code: int) -> None:
        codes.append(code)
        ended.set()
        raise SystemExit

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    for name in ("boost.train.agent", "boost.train.overdue"):
        monkeypatch.setattr(f"{name}.leave", leave)
    for name in ("boost.train.agent.MARGIN_S", "boost.train.agent._NOTE_S", "boost.train.overdue.LOOK_S"):
        monkeypatch.setattr(name, 0.01)
    return codes, ended


@pytest.mark.parametrize("answers_at_first", [False, True])
def test_a_rendezvous_that_never_answers_ends_the_launch(
    answers_at_first: bool, left: tuple[list[int], threading.Event], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """torch's call blocks in C++: before the agent exists, or in a request after all processes have failed."""

    class Store:
        def check(self, keys: list[str]) -> bool:
            assert left[1].wait(600)
            return False

    def blocks(_: Any) -> None:
        if answers_at_first:
            monkeypatch.setattr("boost.train.agent.Agent", lambda: agent_of(3))
            made: Any = api.LocalElasticAgent
            agent = made()
            result = RunResult(WorkerState.FAILED, {}, agent.failures())
            monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", lambda *_: result)
            agent._store = Store()
            agent._monitor_workers(SimpleNamespace(group_world_size=2, spec=SimpleNamespace(monitor_interval=0.0)))
        assert left[1].wait(600)

    monkeypatch.setattr("torch.distributed.run.run", blocks)
    monkeypatch.setattr(threading.Timer, "cancel", threading.Timer.join)  # the launch would end before it prints
    options = ("--nnodes", "2", "--rdzv-endpoint", "one:29400", "--rdzv-conf", "read_timeout=0")
    err = say(capsys, "launch", *options, "--", "verify")[2]
    cause = "process 1 of 1 (rank 0) ended with exit code 3; " if answers_at_first else ""
    assert left[0] == [3]
    assert f"boost: error: {cause}the rendezvous at one:29400 does not respond\n" in err
    assert answers_at_first or "waiting for the rendezvous at one:29400\n" in err


def test_a_node_whose_processes_run_or_are_done_does_not_depend_on_the_rendezvous(
    left: tuple[list[int], threading.Event],
) -> None:
    agent = agent_of(0, None)
    agent._limit(5)
    assert agent.waits() is None
    done = agent_of(0, 0)
    done._limit(5)
    assert done.waits()[1] == 5
    done._worker_group.state = WorkerState.SUCCEEDED
    with pytest.raises(SystemExit):
        done.end_alone("the rendezvous at one:29400")
    assert left[0] == [0]


def launched(
    folder: Path, store: Path, *words: str, restarts: int = 0, nproc: int = 2, **variables: str
) -> ForkedPython:
    """`boost launch` of an endless run."""
    config = folder / "run.toml"
    config.write_text(f'{toml(store, steps=100000, save_every=0, eval_every=0, log_every=1)}dir = "{folder / "run"}"\n')
    options = ("--nproc-per-node", str(nproc), "--max-restarts", str(restarts))
    command = ["launch", *TORCHRUN, *options, "--", "train", str(config), *words]
    return ForkedPython(boost_command, [command], os.environ | {"OMP_NUM_THREADS": "1"} | variables)


def workers_of_a_run(process: ForkedPython, run: Path) -> list[int]:
    """Waits for a few steps; returns the process IDs."""
    metrics, deadline = run / "metrics.jsonl", time.monotonic() + LIMIT_S
    while not metrics.exists() or metrics.read_text().count("\n") < 3:
        assert process.poll() is None and time.monotonic() < deadline, process.said()
        time.sleep(0.1)
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        (("--parallel.tp", "1"), 2, "the mesh has size 1, but the number of started processes is 2; start 1"),
        pytest.param(
            ("--inject-fault", "kill@3:1"),
            3,
            "process 2 of 2 (rank 1) was killed by SIGKILL",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            ("--inject-fault", "hang@3:1", "--run.timeout_s", "30"),
            3,
            "process 2 of 2 (rank 1) is not responding",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_an_error_of_the_processes_is_one_last_line_and_a_code(
    words: tuple[str, ...], code: int, error: str, store: Path, tmp_path: Path
) -> None:
    """A mistake (2) is not repeated, though restarts are left."""
    process = launched(tmp_path, store, *words, restarts=3 if code == 2 else 0)
    try:
        out, err = process.communicate()
        assert process.returncode == code, err
    finally:
        process.close()
    assert (out + err).count("boost: error: ") == 1 and "Traceback" not in err
    assert err.splitlines()[-1].startswith("boost: error: ") and error in err.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.nightly)])
def test_repeated_signals_do_not_interrupt_a_save(number: int, store: Path, tmp_path: Path) -> None:
    """A scheduler may send a signal at the grace's start and end; torchrun itself would end at the third, before its processes."""
    process = launched(tmp_path, store, "--parallel.tp", "1", nproc=1)
    try:
        workers = workers_of_a_run(process, tmp_path / "run")
        for pid in workers:  # as if the save took seconds
            os.kill(pid, signal.SIGSTOP)
        for _ in range(5):
            process.send_signal(number)
            time.sleep(0.3)
        assert process.poll() is None, process.said()
        for pid in workers:
            os.kill(pid, signal.SIGCONT)
        assert process.wait() == 75, process.said()
    finally:
        process.close()
    assert not any(alive(pid) for pid in workers)
    assert len(saved_steps(tmp_path / "run")) == 1


@pytest.mark.nightly  # the message's code and text without processes: the root causes above
@pytest.mark.parametrize(
    ("is_slow", "code", "error"),
    [(True, 3, "was still saving when torchrun's time limit after SIGTERM ended it"), (False, 2, "checkpoints")],
)
def test_a_save_that_fails_after_a_signal_is_reported(
    is_slow: bool, code: int, error: str, store: Path, tmp_path: Path
) -> None:
    """Too slow for torchrun's time limit, or into a folder that cannot be made."""
    seconds = "2" if is_slow else "60"
    words = ("--run.save_retry_minutes", "0")
    process = launched(tmp_path, store, *words, restarts=3, TORCH_ELASTIC_SHUTDOWN_TIMEOUT=seconds)
    try:
        workers = workers_of_a_run(process, tmp_path / "run")
        if is_slow:
            for pid in workers:
                os.kill(pid, signal.SIGSTOP)
        else:
            folder = tmp_path / "run" / "checkpoints"
            if folder.exists():
                folder.rmdir()
            folder.write_text("not a folder")
        process.send_signal(signal.SIGTERM)
        found, said = process.wait(), process.said()[1]
    finally:
        process.close()
    assert found == code, said
    assert said.splitlines()[-1].startswith("boost: error: ") and error in said.splitlines()[-1]
