"""Single-machine launcher, without torchrun: starts, watches and ends the processes together, and reports a failure in one line.

The launcher starts the processes, forwards signals to them and waits. It forks them if no GPU can be involved (`can_fork`), and
otherwise spawns them. Each process runs `entry` and, if that fails, writes a report to a shared folder. From the reports and exit
codes, the launcher determines and reports the root cause. torch's elastic agent opens two TCP stores on all
interfaces and unpickles their contents; this launcher does not. It handles one machine only, does not restart processes
(unless `launch(supervise=...)` does), and detects which process is hung.

Signals are blocked while a process starts. It inherits the mask, and signals stay pending until it unblocks them, so a Ctrl-C
during startup prints no traceback and is not lost.
"""

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from boost import errors
from boost.errors import BoostError, ConfigError, TrainingError
from boost.machine import available_cores
from boost.paths import status
from boost.text import printable_text
from boost.train.failures import FailureReport, how_it_ended, read_reports, root_cause
from boost.train.heartbeat import process_name, read_beats
from boost.train.signals import (
    SECOND_INTERRUPT_S,
    STOP_SIGNALS,
    StopRequest,
    answer_interrupt,
    caught_signals,
    mute_closed_streams,
)
from boost.train.worker import STOPPED_EXIT, LaunchSpec, run_worker, stacks_file

ORPHAN_GRACE_S = 30.0
"""Time, in seconds, that a process has to save and exit after its launcher is killed."""

FAILURE_GRACE_S = 5.0
"""Time, in seconds, that the other processes have to report and exit after one fails."""

SAVING_GRACE_S = 60.0
"""The same, while one of them is writing a checkpoint."""

HANG_GRACE_S = 0.5
"""The same, after a process has reported a hang, when nothing can be saved anymore."""

_POLL_S = 0.1


Supervise = Callable[
    [Path, Callable[[int], None], Mapping[int, BaseProcess], Sequence[int], Callable[[], bool]], dict[int, int]
]
"""Starts the processes and watches them until the run is over: (launch folder, function that starts a rank's process, the latest
process of each rank, signals received so far, whether to abort) -> exit codes, by rank, of the processes that ended the run."""


def under_torchrun() -> bool:
    """Whether torchrun (or our launcher) started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def can_fork() -> bool:
    """Whether a run's processes can be forked. Forked processes start in milliseconds and share the memory of imported
    modules.

    True only on Linux with a CPU build of torch, because GPU drivers do not survive a fork.
    """
    return sys.platform == "linux" and not torch.backends.cuda.is_built()


def launch(
    entry: Callable[..., int],
    args: tuple[object, ...],
    nproc: int,
    log_dir: Path | None,
    orphan_grace_s: float = ORPHAN_GRACE_S,
    holds_signals: bool = False,
    forks: bool = False,
    supervise: Supervise | None = None,
) -> int:
    """Runs `entry(*args)` in `nproc` local processes and returns the first nonzero exit code, or 0.

    `entry` must be a module-level function, and `args` picklable. Global rank 0 inherits stdout and stderr; the output of other
    ranks is appended to log_dir/rank{r}.out (without `log_dir`, they share the terminal). Stop signals and SIGUSR2 are forwarded to
    the processes, which decide when to exit. With `holds_signals`, signals stay pending in each process until `entry` opens a
    StopRequest, so that none is lost during startup. A second Ctrl-C ends the processes. Call `launch` on the main thread.

    `forks`: forks the processes instead of spawning them. Requires `can_fork`. This process must have computed on a single
    thread, because OpenMP's threads do not survive a fork, and the next parallel loop would wait for them.

    `supervise`: starts and watches the processes. By default, all of them end after one fails.

    Raises StoppedError if an open StopRequest has caught a signal, the BoostError of the process that failed first,
    TrainingError if a process is killed or loses its connections, and KeyboardInterrupt if an interrupt ends a process. For a
    bug in `entry`, prints the traceback once, keeps it in log_dir/rank{r}.log, and returns 1.
    """
    if nproc < 1:
        raise ConfigError(f"--nproc = {nproc} must be at least 1; smallest valid value: 1")
    with tempfile.TemporaryDirectory(prefix="boost-launch-") as folder:
        spec = LaunchSpec(entry, args, nproc, Path(folder), log_dir, os.getpid(), orphan_grace_s, holds_signals)
        with _omp_threads(nproc), _forward_signals(spec, forks) as signals:
            StopRequest.require_none()  # from here on, signals are forwarded
            failed = _run(spec, signals, "fork" if forks else "spawn", supervise)
        if failed:
            return _raise_root_cause(spec, failed, read_reports(spec.folder), signals)
        written = [path for rank in range(nproc) if status(path := spec.folder / f"code{rank}")]
        codes = [int(path.read_text(encoding="ascii")) for path in written]
        return next((code for code in codes if code), 0)


@dataclass
class _Signals:
    """Signals that the launcher has received, and the processes that it forwards them to."""

    received: list[int] = field(default_factory=list)
    processes: dict[int, BaseProcess] = field(default_factory=dict)
    """The latest process of each rank."""
    interrupted_at: float | None = None
    aborted: bool = False
    """Whether a second Ctrl-C requested that the processes end immediately."""


def _run(spec: LaunchSpec, signals: _Signals, method: str, supervise: Supervise | None) -> dict[int, int]:
    """Starts the processes and waits until all have ended. Returns the exit codes, by rank, of those that failed on their own."""
    context: Any = multiprocessing.get_context(method)

    def start(rank: int) -> None:
        process: Any = context.Process(target=run_worker, args=(spec, rank), name=f"boost-rank{rank}")
        gc.freeze()  # otherwise each forked process copies every object at its first garbage collection
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, caught_signals())
        try:
            process.start()
            signals.processes[rank] = process
            for number in set(signals.received) & set(STOP_SIGNALS):  # before this process existed
                os.kill(process.pid, number)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            gc.unfreeze()

    try:
        if supervise is not None:
            failed = supervise(spec.folder, start, signals.processes, signals.received, lambda: signals.aborted)
            return failed or ({0: -signal.SIGKILL} if signals.aborted else {})
        for rank in range(spec.nproc):
            start(rank)
        return _supervise(spec, signals)
    finally:
        for process in signals.processes.values():
            process.kill()
            process.join()
        for path in filter(None, (stacks_file(spec, rank) for rank in range(spec.nproc))):
            with contextlib.suppress(OSError):
                if not path.stat().st_size:
                    path.unlink()


def _supervise(spec: LaunchSpec, signals: _Signals) -> dict[int, int]:
    failed: dict[int, int] = {}
    failed_at: float | None = None
    while running := [process for process in signals.processes.values() if process.exitcode is None]:
        connection.wait([process.sentinel for process in running], _POLL_S)
        codes = {rank: process.exitcode for rank, process in signals.processes.items()}
        failed = {rank: code for rank, code in codes.items() if code}
        if failed_at is None and (failed or signals.aborted):
            failed_at = time.monotonic()
        if failed_at is None:
            continue
        # Give the others time to report and exit: more if one is writing a checkpoint, very little if one is hung.
        saving = any(beat.saving and codes[beat.rank] is None for beat in read_beats(spec.folder))
        grace_s = SAVING_GRACE_S if saving else FAILURE_GRACE_S
        if any(report.kind == "hung" for report in read_reports(spec.folder)):
            grace_s = HANG_GRACE_S
        if time.monotonic() - failed_at > grace_s:
            if spec.log_dir:
                for process in running:  # each writes its stacks before it is killed, unless it is suspended
                    if process.pid is not None:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(process.pid, signal.SIGQUIT)
                time.sleep(0.5)
            break
    else:  # a process may have ended after the last check of exit codes
        failed = {rank: code for rank, process in signals.processes.items() if (code := process.exitcode)}
    return failed or ({0: -signal.SIGKILL} if signals.aborted and failed_at is not None else {})


@contextlib.contextmanager
def _omp_threads(nproc: int) -> Iterator[None]:
    """Divides the cores among the processes unless OMP_NUM_THREADS is set."""
    if threads := os.environ.get("OMP_NUM_THREADS"):
        if not threads.isdecimal() or int(threads) < 1:
            raise ConfigError(
                f"OMP_NUM_THREADS = {threads!r} must be a positive integer (threads per process); correct it or unset it"
            )
        yield
        return
    os.environ["OMP_NUM_THREADS"] = str(max(1, available_cores() // nproc))
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]


@contextlib.contextmanager
def _forward_signals(spec: LaunchSpec, forks: bool) -> Iterator[_Signals]:
    """Context manager that forwards signals to the processes; yields the signals received so far."""
    signals = _Signals()

    def forward(number: int, frame: FrameType | None) -> None:
        """Records a signal for processes that have not started yet, responds to Ctrl-C, and forwards the signal to running ones."""
        signals.received.append(number)
        if number == signal.SIGHUP:
            mute_closed_streams()
        if number == signal.SIGINT:
            now = time.monotonic()
            if signals.interrupted_at is None:
                signals.interrupted_at = now
                if spec.holds_signals:
                    answer_interrupt()
            elif now - signals.interrupted_at > SECOND_INTERRUPT_S:
                signals.aborted = True
        for process in signals.processes.values():
            if process.pid is not None and process.exitcode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    if not forks:
        # Processes exit without cleaning up. The resource tracker does that for them, but would warn about it.
        sys.warnoptions.append("ignore:resource_tracker")
        resource_tracker.ensure_running()  # otherwise the first spawn starts it and unblocks signals on this thread
    before = {number: signal.signal(number, forward) for number in caught_signals()}
    mask = signal.pthread_sigmask(
        signal.SIG_UNBLOCK, caught_signals()
    )  # they may be blocked where this process was started
    try:
        yield signals
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _raise_root_cause(
    spec: LaunchSpec, failed: Mapping[int, int], reports: list[FailureReport], signals: _Signals
) -> int:
    interrupts = (-signal.SIGINT, STOPPED_EXIT + signal.SIGINT)
    if signals.aborted or (signal.SIGINT in signals.received and any(code in interrupts for code in failed.values())):
        raise KeyboardInterrupt
    report = root_cause(failed, reports)
    if isinstance(report, int):  # a process that ended without a report
        code = failed[report]
        if -code in signals.received:
            name = signal.Signals(-code).name
            error = TrainingError(f"stopped by {name} during startup or shutdown; existing checkpoints are intact")
            error.exit_code = STOPPED_EXIT - code
            raise error
        others = "; the other processes were stopped" if spec.nproc > 1 else ""
        raise TrainingError(f"{process_name(report, spec.nproc)} {how_it_ended(code)}{others}; {_resume_hint(spec)}")
    who = process_name(report.rank, spec.nproc)
    if report.kind == "defect":
        print(f"{who} failed:\n{printable_text(report.message)}", file=sys.stderr, flush=True)
        return 1
    failure: BoostError = getattr(errors, report.error)(report.message)
    if report.kind == "lost":
        failure = TrainingError(f"{who} lost its connection to another process: {report.message}; {_resume_hint(spec)}")
    elif report.kind == "hung":
        failure = errors.HangError(f"{report.message}; {_resume_hint(spec)}")
    failure.exit_code = report.exit_code
    failure.add_note(f"in {who}:\n{report.trace}")
    raise failure


def _resume_hint(spec: LaunchSpec) -> str:
    logs = f"; logs: {spec.log_dir}" if spec.log_dir else ""
    return f"resume with --resume auto{logs}"
