"""Runs `boost train` as a background command and reads its processes' heartbeats."""

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from boost.train.checkpoint import complete_checkpoints
from boost.train.heartbeat import read_beats
from tests import toy
from tests.distributed import fork_server

LIMIT_S = 600
"""Only prevents endless hangs."""

QUIET = ("--train.eval_every", "0", "--train.save_every", "0")
"""Flags of a run that does not evaluate or save before it ends."""


def toml(store: Path, *, tp: int = 2, micro_batch: int = 4, **train: int | str) -> str:
    """Writes the configuration of a command; keywords are fields of [train]."""
    fields = {"seq_len": 32, "global_batch": 4, "micro_batch": micro_batch, **train}
    lines = [f"{name} = {json.dumps(value)}" for name, value in fields.items()]
    sections = (f"[parallel]\ntp = {tp}", "[optim]\nlr = 3e-3", "\n".join(["[train]", *lines]))
    return "\n".join((toy.TOML, *sections, f'[data]\nstore = "{store}"', '[run]\ndevice = "cpu"\npeak_tflops = 1\n'))


ENDLESS = {"steps": 100000, "save_every": 20, "eval_every": 30, "eval_tokens": 6400, "log_every": 1000, "keep": 100000}
"""[train] of a run that tests end."""


def training(folder: Path, store: Path, *words: str) -> list[str]:
    """The command of an endless run in `folder`/run, and its configuration."""
    config = folder / "run.toml"
    config.write_text(f'{toml(store, **ENDLESS)}dir = "{folder / "run"}"\n')
    return [sys.executable, "-m", "boost.cli.main", "train", str(config), *words]


def phases_in(shared: Path) -> set[str]:
    """Phases of the processes that send heartbeats, given the folder in which their launcher creates its own."""
    folders = list(shared.glob("boost-launch-*"))
    return {beat.phase for beat in read_beats(folders[0])} if folders else set()


class ForkedPython:
    """Like `subprocess.Popen` for Python, but forked from the server of `tests/distributed.py`, without seconds of imports.

    It runs `function(*arguments)`, which returns the exit code, in a separate session with this environment. `output`: a
    terminal or device that it writes to.
    """

    def __init__(
        self, function: Callable[..., int], arguments: Sequence[Any], environment: Mapping[str, str], output: str = ""
    ) -> None:
        self._streams = [Path(tempfile.mkstemp(prefix="boost-test-")[1]) for _ in ("out", "err")]
        self._process = fork_server().Process(
            target=run_forked, args=(function, tuple(arguments), dict(environment), self._streams, output)
        )
        self._process.start()
        self.pid: int = self._process.pid  # type: ignore[assignment]

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float = LIMIT_S) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self._process), timeout)
        return self._process.exitcode

    def communicate(self, timeout: float = LIMIT_S) -> tuple[str, str]:
        """The output of the ended process; unlike a pipe's, it can be read more than once."""
        self.wait(timeout)
        return self.said()

    def said(self) -> tuple[str, str]:
        """Its output so far."""
        out, err = (path.read_text(errors="replace") for path in self._streams)
        return out, err

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Kills the remaining processes of its session."""
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
            self.wait()
        for path in self._streams:
            path.unlink(missing_ok=True)


def run_forked(
    function: Callable[..., int],
    arguments: tuple[Any, ...],
    environment: dict[str, str],
    streams: list[Path],
    output: str,
) -> None:
    """Runs in the forked process."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # of the former TMPDIR
    for descriptor, path in enumerate(streams, 1):
        # The first terminal that a new session opens becomes its controlling terminal.
        os.dup2(os.open(output or path, os.O_RDWR if output else os.O_WRONLY | os.O_APPEND), descriptor)
    renew_output()
    try:
        sys.exit(function(*arguments))
    finally:
        atexit._run_exitfuncs()  # which multiprocessing leaves out


def free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def alive(pid: int) -> bool:
    """Whether the process runs; False for a zombie."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False
    return state != "Z"


def renew_output() -> None:
    """Reopens standard output and error, because Python caches whether their files are seekable or terminals."""
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", 1, closefd=False)  # noqa: SIM115


def boost_command(words: list[str]) -> int:
    """`boost` with these arguments."""
    from boost.cli.main import main

    sys.argv = ["boost", *words]
    return main(words)


class Command:
    """`boost train` on two processes, with access to its launcher's folder."""

    def __init__(self, folder: Path, store: Path, *words: str, output: str = "", **variables: str) -> None:
        self.run, self.shared = folder / "run", folder / "shared"
        self.shared.mkdir(exist_ok=True)
        command = training(folder, store, *words)
        environment = os.environ | {"TMPDIR": str(self.shared), "OMP_NUM_THREADS": "1"} | variables
        self.process = ForkedPython(boost_command, [command[3:]], environment, output)

    def phases(self) -> set[str]:
        """Phases of the processes that send heartbeats."""
        return phases_in(self.shared)

    def processes(self) -> list[int]:
        """The launcher and the processes of the run. (With a CUDA build of torch, multiprocessing's tracker is another child.)"""
        command = ["pgrep", "--list-full", "--parent", str(self.process.pid)]
        found = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
        return [self.process.pid, *(int(line.split()[0]) for line in found if "resource_tracker" not in line)]

    def wait_for(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def finish(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=LIMIT_S)
        assert self.process.returncode is not None
        return self.process.returncode, out, err

    def __enter__(self) -> "Command":
        return self

    def __exit__(self, *error: object) -> None:
        self.process.close()


def saved_steps(run: Path) -> list[int]:
    """Steps of the complete checkpoints, read from state.json."""
    return [json.loads((path / "state.json").read_text())["step"] for path in complete_checkpoints(run / "checkpoints")]
