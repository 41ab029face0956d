"""The launcher's worker process: sets up the environment, output and signals, and writes a failure report for the launcher."""

import contextlib
import faulthandler
import fcntl
import logging
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TextIO

import torch

from boost.text import prepare_streams, printable_text
from boost.train.best_effort import best_effort
from boost.train.failures import failure_report
from boost.train.overdue import leave
from boost.train.rendezvous import LAUNCH_DIR
from boost.train.signals import StopRequest, caught_signals

STOPPED_EXIT = 128
"""Offset of exit codes: a process stopped by a signal exits with this plus the signal number, as in a shell."""


@dataclass(frozen=True)
class LaunchSpec:
    """Arguments of a worker process, pickled if the process is spawned."""

    entry: Callable[..., int]
    args: tuple[object, ...]
    nproc: int
    folder: Path
    log_dir: Path | None
    launcher: int
    """Process id of the launcher."""
    orphan_grace_s: float
    holds_signals: bool
    """Whether signals stay blocked until `entry` catches them."""


def run_worker(spec: LaunchSpec, rank: int) -> None:
    """Entry point of a worker process, which inherits blocked signals from the launcher. Does not return or raise."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(spec.nproc),
        "LOCAL_WORLD_SIZE": str(spec.nproc),
        LAUNCH_DIR: str(spec.folder),
    }
    prepare_streams()  # a spawned process has its own streams
    stay_on_loopback()
    StopRequest.begin_process()
    logging.getLogger("boost").handlers.clear()  # a forked process inherits the launcher's handlers
    caught = caught_signals()
    for number in caught:
        signal.signal(number, signal.SIG_DFL)
    in_use: list[int] = []
    with contextlib.suppress(OSError):  # a temporary-file cleaner may have removed it, but the run does not need it
        in_use.append(os.open(spec.folder, os.O_RDONLY))
        fcntl.flock(in_use[0], fcntl.LOCK_SH)  # for the life of the process

    def remove_folder() -> None:
        """Removes the launcher's folder, which holds the run's store with in-step recovery, unless another process needs it."""
        with contextlib.suppress(OSError):
            for descriptor in in_use:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(spec.folder, ignore_errors=True)

    def end() -> None:
        """Ends this process if a stuck collective keeps it from stopping."""
        time.sleep(spec.orphan_grace_s)
        remove_folder()
        os._exit(1)

    try:
        stop_without(spec.launcher, end)
    except RuntimeError as error:  # no thread
        _report_and_leave(spec, rank, error)
    if rank and spec.log_dir:
        _redirect_output(spec.log_dir / f"rank{rank}.out")
    stacks: TextIO | BinaryIO = sys.stderr
    if path := stacks_file(spec, rank):
        with contextlib.suppress(OSError):  # the main process will report the error
            path.parent.mkdir(parents=True, exist_ok=True)
            stacks = open(path, "ab")  # noqa: SIM115 (stays open for the life of the process)
    faulthandler.register(signal.SIGQUIT, stacks, all_threads=True)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if not spec.holds_signals:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, caught)
    try:
        code = spec.entry(*spec.args)
    except KeyboardInterrupt:
        leave(STOPPED_EXIT + signal.SIGINT)
    except BaseException as error:
        _report_and_leave(spec, rank, error)
    signal.pthread_sigmask(signal.SIG_BLOCK, caught)  # the work is done, so ignore stop signals
    if os.getppid() != spec.launcher:
        remove_folder()  # the launcher has died and cannot clean up
    elif code:
        with best_effort("write the exit code"):
            (spec.folder / f"code{rank}").write_text(str(code), encoding="ascii")
    leave(0)


def stop_without(parent: int, afterwards: Callable[[], None] = lambda: None) -> None:
    """Starts a thread that sends SIGTERM to this process when its parent dies, and then calls `afterwards`."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)
        afterwards()

    threading.Thread(target=watch, name="boost-launcher-watch", daemon=True).start()


def stacks_file(spec: LaunchSpec, rank: int) -> Path | None:
    """The file to which stacks are written on SIGQUIT; None means stderr."""
    return spec.log_dir and spec.log_dir / f"rank{rank}.stacks"


def stay_on_loopback() -> None:
    """Binds gloo and NCCL to the loopback interface unless the user has set another one, because the run is local."""
    names = [name for _, name in socket.if_nameindex()]
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={loopback}")  # "=": exact name, not a prefix


def _report_and_leave(spec: LaunchSpec, rank: int, error: BaseException) -> None:
    report = failure_report(error, rank)
    logger = logging.getLogger("boost")
    if report.kind != "boost":
        if not logger.handlers and spec.log_dir:
            with contextlib.suppress(OSError):
                spec.log_dir.mkdir(parents=True, exist_ok=True)
                logger.addHandler(logging.FileHandler(spec.log_dir / f"rank{rank}.log", encoding="utf-8"))
        if logger.handlers:
            logger.error("%s", report.trace)
    if not report.write(spec.folder):
        with contextlib.suppress(OSError):
            print(f"boost: error: {printable_text(report.message)}", file=sys.stderr, flush=True)
    leave(report.exit_code)


_terminal: list[tuple[int, int]] = []
"""(duplicate of the original descriptor, descriptor) for each stream redirected by `_redirect_output`."""


def take_terminal() -> None:
    """Restores the launcher's stdout and stderr."""
    sys.stdout.flush()
    sys.stderr.flush()
    while _terminal:
        os.dup2(*_terminal.pop())


def _redirect_output(path: Path) -> None:
    """Appends stdout and stderr, including output of C code, to `path`. Ignores errors, because the main process reports them."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab") as file:
            sys.stdout.flush()
            sys.stderr.flush()
            _terminal[:] = [(os.dup(descriptor), descriptor) for descriptor in (1, 2)]
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
