"""Local processes without torchrun: torch's elastic agent started from Python, with a one-line error for a failure.

The parent starts the agent, forwards stop signals to the processes and waits; each process runs `entry` and, if that
fails, writes a report into a shared folder. The parent finds the root cause from the reports and exit codes and prints it.
Signals are blocked while a process starts (a spawned process inherits the mask), so that a Ctrl-C in those
seconds neither prints tracebacks nor is lost.
"""

import contextlib
import json
import logging
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from boost import errors
from boost.errors import BoostError, ConfigError, StorageError, TrainingError
from boost.train.rundir import available_cores
from boost.train.signals import STOP_SIGNALS

ORPHAN_GRACE_S = 30.0
"""Seconds that a process has to save and exit after its launcher was killed."""

LOST_CONNECTION_WAIT_S = 5.0
"""Seconds that a process waits before exiting after a lost connection: the agent should see the cause first."""

_STOPPED_EXIT = 128
"""Plus a signal number: exit code of a process that the signal stopped, as in a shell."""

_LOST_CONNECTION = re.compile(
    r"connection (was )?(reset|closed|refused|aborted)|closed by peer|broken pipe|timed? ?out", re.IGNORECASE
)
_NOISY_LOGGERS = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")


def under_torchrun() -> bool:
    """Whether torchrun (or our launcher) started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(
    entry: Callable[..., int],
    args: tuple[Any, ...],
    nproc: int,
    log_dir: Path | None,
    orphan_grace_s: float = ORPHAN_GRACE_S,
) -> int:
    """Runs `entry(*args)` in `nproc` local processes and returns the first exit code that is not 0, else 0.

    `entry` is a module-level function, `args` must be picklable. Global rank 0 inherits stdout and stderr; output of the
    others is appended to log_dir/rank{r}.out (without `log_dir` they share the terminal). SIGTERM, SIGUSR1 and SIGINT
    are forwarded, and the processes decide when to exit. Must be called on the main thread.

    Raises the BoostError of the process that failed first; TrainingError if a process was killed or lost its
    connections; KeyboardInterrupt if an interrupt ended one. For a bug in `entry`, prints the traceback once, keeps it
    in log_dir/rank{r}.log, and returns 1.
    """
    if nproc < 1:
        raise ConfigError(f"--nproc = {nproc} is not a number of processes; smallest valid value: 1")
    with tempfile.TemporaryDirectory(prefix="boost-launch-") as folder, _quiet_agent():
        call = _LaunchSpec(entry, args, nproc, Path(folder), log_dir, os.getpid(), orphan_grace_s)
        with _omp_threads(nproc), _forward_stop_signals(Path(folder)) as received:
            try:
                codes = elastic_launch(_launch_config(nproc, folder), _worker)(call)
            except ChildFailedError as error:
                rank, failure = next(iter(error.failures.items()))
                failed = _FirstFailure(rank, failure.exitcode)
            except SignalException as error:
                return _STOPPED_EXIT + error.sigval
            else:
                return next((codes[rank] for rank in sorted(codes) if codes[rank]), 0)
        return _raise_root_cause(call, failed, read_reports(Path(folder)), received)


@dataclass(frozen=True)
class FailureReport:
    """Failure of one process: a JSON file in the shared folder."""

    rank: int
    kind: str
    """boost: an error that the user can fix; lost: a connection to another process broke; defect: a bug, anything else."""
    message: str
    """One line for boost and lost; the traceback for a defect."""
    error: str
    """Name of the class in boost.errors to raise."""
    exit_code: int
    trace: str
    time: float
    """Seconds since the epoch."""


@dataclass(frozen=True)
class _LaunchSpec:
    """Arguments of a worker process; pickled."""

    entry: Callable[..., int]
    args: tuple[Any, ...]
    nproc: int
    folder: Path
    log_dir: Path | None
    launcher: int
    orphan_grace_s: float


@dataclass(frozen=True)
class _FirstFailure:
    """The process that the agent saw fail first. A negative exit code is a signal number."""

    rank: int
    exit_code: int


# The parent


def _launch_config(nproc: int, folder: str) -> LaunchConfig:
    """What `torchrun --standalone --max-restarts 0` would use. The agent handles no signal that we forward."""
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="spawn",
        logs_specs=DefaultLogsSpecs(log_dir=f"{folder}/agent"),
        signals_to_handle="SIGQUIT",
    )


@contextlib.contextmanager
def _quiet_agent() -> Iterator[None]:
    """Silences the agent, which logs a table and tracebacks at ERROR; `_raise_root_cause` reports the failure instead.

    Each of torch's loggers has its own level, so setting one on their parent would have no effect.
    """
    loggers = [
        logging.getLogger(name) for name in list(logging.root.manager.loggerDict) if name.startswith(_NOISY_LOGGERS)
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def _omp_threads(nproc: int) -> Iterator[None]:
    """Divides the cores among the processes, unless the user has set OMP_NUM_THREADS."""
    if threads := os.environ.get("OMP_NUM_THREADS"):
        if not threads.isdecimal() or int(threads) < 1:
            raise ConfigError(
                f"OMP_NUM_THREADS = {threads!r} is not a number of threads; unset it or set it to 1 or more"
            )
        yield
        return
    os.environ["OMP_NUM_THREADS"] = str(max(1, available_cores() // nproc))
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]


@contextlib.contextmanager
def _forward_stop_signals(folder: Path) -> Iterator[list[int]]:
    """While open, forwards stop signals to the processes; yields the list of those received so far.

    This thread blocks them, so that spawned processes inherit the mask; a second thread does not block them,
    so that they are delivered (Python still runs the handlers on the main thread).
    """
    received: list[int] = []
    unrelated = {process.pid for process in multiprocessing.active_children()}

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        # A process that has not started yet reads the file when it does.
        (folder / "stop").write_text(str(number), encoding="ascii")
        for process in multiprocessing.active_children():
            if process.pid is not None and process.pid not in unrelated:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    # Otherwise the first spawn starts it, which unblocks signals on this thread.
    resource_tracker.ensure_running()
    over = threading.Event()
    handled = (*STOP_SIGNALS, signal.SIGQUIT)  # the agent installs a SIGQUIT handler and never removes it
    before = {number: signal.getsignal(number) for number in handled}
    receiver = threading.Thread(target=_receive_signals, args=(over,), name="boost-signals", daemon=True)
    for number in STOP_SIGNALS:
        signal.signal(number, forward)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    receiver.start()
    try:
        yield received
    finally:
        over.set()
        receiver.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _receive_signals(over: threading.Event) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    over.wait()


def read_reports(folder: Path) -> list[FailureReport]:
    """The reports of the processes that could write one, earliest first."""
    reports = [FailureReport(**json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("report*.json")]
    return sorted(reports, key=lambda report: report.time)


def root_cause(failed_rank: int, reports: list[FailureReport]) -> FailureReport | None:
    """The report that explains the others; None if process `failed_rank`, which failed first, died without a report.

    A user error takes precedence over everything; a death without a report explains the bugs and lost connections that
    other processes report from their collectives; a lost connection is the cause only if there is no other report.
    """
    silent = failed_rank not in {report.rank for report in reports}
    for kind in ("boost",) if silent else ("boost", "defect", "lost"):
        for report in reports:
            if report.kind == kind:
                return report
    return None


def _raise_root_cause(
    call: _LaunchSpec, failed: _FirstFailure, reports: list[FailureReport], received: list[int]
) -> int:
    if signal.SIGINT in received and failed.exit_code in (-signal.SIGINT, _STOPPED_EXIT + signal.SIGINT):
        raise KeyboardInterrupt
    report = root_cause(failed.rank, reports)
    if report is None:
        raise _killed_error(call, failed, received)
    if report.kind == "defect":
        print(f"{_process_name(call, report.rank)} failed:\n{report.message}", file=sys.stderr, flush=True)
        return 1
    error: BoostError = getattr(errors, report.error)(report.message)
    if report.kind == "lost":
        error = TrainingError(
            f"{_process_name(call, report.rank)} lost another one: {report.message}; {_resume_hint(call)}"
        )
    error.exit_code = report.exit_code
    error.add_note(f"in {_process_name(call, report.rank)}:\n{report.trace}")
    raise error


def _killed_error(call: _LaunchSpec, failed: _FirstFailure, received: list[int]) -> BoostError:
    """The error for a process that ended without a report."""
    number = -failed.exit_code
    if number in received:
        name = signal.Signals(number).name
        error = TrainingError(f"stopped by {name} while starting up or ending; what was saved before is intact")
        error.exit_code = _STOPPED_EXIT + number
        return error
    how = f"was ended by {_signal_name(number)}" if number > 0 else f"ended with exit code {failed.exit_code}"
    hint = " (out of memory?)" if number == signal.SIGKILL else ""
    others = "; the others were stopped" if call.nproc > 1 else ""
    return TrainingError(f"{_process_name(call, failed.rank)} {how}{hint}{others}; {_resume_hint(call)}")


def _process_name(call: _LaunchSpec, rank: int) -> str:
    return f"process {rank + 1} of {call.nproc} (rank {rank})"


def _resume_hint(call: _LaunchSpec) -> str:
    logs = f"; logs: {call.log_dir}" if call.log_dir else ""
    return f"resume with --resume auto{logs}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# The processes


def _worker(call: _LaunchSpec) -> int:
    """Entry point of a worker process. Never lets an exception escape: the agent would print it."""
    rank = int(os.environ["RANK"])
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    threading.Thread(target=_watch_launcher, args=(call,), name="boost-launcher-watch", daemon=True).start()
    if rank and call.log_dir:
        _redirect_output(call.log_dir / f"rank{rank}.out")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    stop = call.folder / "stop"
    if stop.exists():
        os.kill(os.getpid(), int(stop.read_text(encoding="ascii")))
    try:
        code = call.entry(*call.args)
    except KeyboardInterrupt:
        _exit(_STOPPED_EXIT + signal.SIGINT)
    except BaseException as error:
        _report_and_exit(call, rank, error)
    if os.getppid() != call.launcher:
        # The launcher is gone: nobody takes the result or cleans up.
        shutil.rmtree(call.folder, ignore_errors=True)
        _exit(code)
    for number in STOP_SIGNALS:
        signal.signal(number, _exit_soon)
    return code


def _report_and_exit(call: _LaunchSpec, rank: int, error: BaseException) -> None:
    """Writes a report and exits."""
    report = failure_report(error, rank)
    logger = logging.getLogger("boost")
    if report.kind != "boost":
        if not logger.handlers and call.log_dir:
            with contextlib.suppress(OSError):
                call.log_dir.mkdir(parents=True, exist_ok=True)
                logger.addHandler(logging.FileHandler(call.log_dir / f"rank{rank}.log", encoding="utf-8"))
        if logger.handlers:
            logger.error("%s", report.trace)
    partial = call.folder / f"partial{rank}"
    with contextlib.suppress(OSError):
        partial.write_text(json.dumps(asdict(report)), encoding="utf-8")
        partial.rename(call.folder / f"report{rank}.json")
    if report.kind == "lost":
        # The agent ends this wait with SIGTERM as soon as it has seen the cause.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(LOST_CONNECTION_WAIT_S)
    _exit(report.exit_code)


def failure_report(error: BaseException, rank: int) -> FailureReport:
    """The report of `error`, raised in process `rank`."""
    trace = "".join(traceback.format_exception(error))
    now = time.time()
    lost = is_lost_connection(error) or (isinstance(error, BoostError) and is_lost_connection(error.__cause__))
    if lost:
        return FailureReport(rank, "lost", _first_sentence(error), "TrainingError", TrainingError.exit_code, trace, now)
    if isinstance(error, OSError):
        line = f"{error.filename or 'file system'}: {error.strerror or error}"
        return FailureReport(rank, "boost", line, "StorageError", StorageError.exit_code, trace, now)
    if isinstance(error, BoostError):
        name = next(base.__name__ for base in type(error).__mro__ if base.__module__ == errors.__name__)
        return FailureReport(rank, "boost", str(error), name, error.exit_code, trace, now)
    return FailureReport(rank, "defect", trace, "BoostError", 1, trace, now)


def _first_sentence(error: BaseException) -> str:
    """Gloo's messages start with a source file and end with advice."""
    text = re.sub(r"^\[[^\]]*\]\s*", "", str(error).strip()).split("\n")[0]
    return re.split(r"\.\s", text)[0] or type(error).__name__


def is_lost_connection(error: BaseException | None) -> bool:
    """Whether `error` means that another process is gone or silent: a symptom, not the root cause."""
    if isinstance(error, ConnectionError | DistError):
        return True
    return isinstance(error, RuntimeError | OSError) and _LOST_CONNECTION.search(str(error)) is not None


def _exit(code: int) -> None:
    """Exits without interpreter shutdown, where a broken process group can hang forever."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _exit_soon(number: int, frame: FrameType | None) -> None:
    """A stop signal after the work is done: exit with 0, but only after the agent's pipe has the result."""
    timer = threading.Timer(0.5, _exit, (0,))
    timer.daemon = True
    timer.start()


def _redirect_output(path: Path) -> None:
    """Appends stdout and stderr, also of C code, to `path`. Where that fails they stay; the main process will report the error."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab") as file:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)


def _watch_launcher(call: _LaunchSpec) -> None:
    """Ends this process when its launcher is gone: SIGTERM first, then by force if it is stuck in a collective."""
    while os.getppid() == call.launcher:
        time.sleep(0.5)
    shutil.rmtree(call.folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(call.orphan_grace_s)
    os._exit(1)
