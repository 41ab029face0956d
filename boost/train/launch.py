"""Local processes without torchrun: torch's elastic agent started from Python, with one line for what went wrong.

The parent starts the agent, sends stop signals on to the processes and waits; each process runs `entry` and, if that
fails, leaves a report in a folder that the two sides share. The parent says the root cause of those reports and of the
exit codes. Signals are blocked while a process starts (a spawned process inherits the mask), so that a Ctrl-C in those
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
"""What a process whose launcher was killed has to save and leave before it ends itself."""

CONSEQUENCE_WAIT_S = 5.0
"""A process that lost a connection waits so long before it leaves: the agent is to see the one that caused it first."""

_STOPPED_EXIT = 128
"""Plus the number of a signal: the exit code of what a signal stopped, as in a shell."""

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

    `entry` is a module-level function, `args` can be pickled. Rank 0 has this process's stdout and stderr; those of the
    others are appended to log_dir/rank{r}.out (without `log_dir` they share the terminal). SIGTERM, SIGUSR1 and SIGINT
    are sent on, and the processes leave as they see fit. To be called on the main thread.

    Raises the BoostError of the process that failed first; TrainingError if a process was killed or lost its
    connections; KeyboardInterrupt if an interrupt ended one. A defect in `entry` has its traceback printed once and
    kept in log_dir/rank{r}.log, and 1 is returned.
    """
    if nproc < 1:
        raise ConfigError(f"--nproc = {nproc} is not a number of processes; the smallest legal value is 1")
    with tempfile.TemporaryDirectory(prefix="boost-launch-") as folder, _quiet_agent():
        call = _Call(entry, args, nproc, Path(folder), log_dir, os.getpid(), orphan_grace_s)
        with _threads_each(nproc), _stop_signals_sent_on(Path(folder)) as received:
            try:
                codes = elastic_launch(_launch_config(nproc, folder), _process)(call)
            except ChildFailedError as error:
                rank, failure = next(iter(error.failures.items()))
                failed = _Failed(rank, failure.exitcode)
            except SignalException as error:
                return _STOPPED_EXIT + error.sigval
            else:
                return next((codes[rank] for rank in sorted(codes) if codes[rank]), 0)
        return _say_root_cause(call, failed, read_reports(Path(folder)), received)


@dataclass(frozen=True)
class Report:
    """What a process says of its failure: one JSON file in the shared folder."""

    rank: int
    kind: str
    """boost: an error that a user can mend; lost: a connection to another process broke; defect: anything else."""
    message: str
    """One line for boost and lost; the traceback for a defect."""
    error: str
    """Name of the class in boost.errors to raise."""
    exit_code: int
    trace: str
    time: float
    """Seconds since the epoch."""


@dataclass(frozen=True)
class _Call:
    """What a process needs to know; pickled."""

    entry: Callable[..., int]
    args: tuple[Any, ...]
    nproc: int
    folder: Path
    log_dir: Path | None
    launcher: int
    orphan_grace_s: float


@dataclass(frozen=True)
class _Failed:
    """The process that the agent saw fail first. A negative exit code is a signal's number."""

    rank: int
    exit_code: int


# The parent


def _launch_config(nproc: int, folder: str) -> LaunchConfig:
    """What `torchrun --standalone --max-restarts 0` would use. The agent handles no signal that we send on."""
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
    """The agent logs a table and tracebacks of its own at ERROR; what a user needs is said in `_say_root_cause`.

    Each of torch's loggers has a level of its own, so that a level on their parent would not do.
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
def _threads_each(nproc: int) -> Iterator[None]:
    """The processes share the cores, unless the user has said how many threads each is to have."""
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
def _stop_signals_sent_on(folder: Path) -> Iterator[list[int]]:
    """While open, stop signals go to the processes and not to this one; yields the list of those received so far.

    This thread blocks them, for the processes that it spawns to inherit; a thread that does not block them stands by,
    so that they are delivered (their handlers run on this thread all the same).
    """
    received: list[int] = []
    not_ours = {process.pid for process in multiprocessing.active_children()}

    def send_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        # A process that has not started yet reads the file when it does.
        (folder / "stop").write_text(str(number), encoding="ascii")
        for process in multiprocessing.active_children():
            if process.pid is not None and process.pid not in not_ours:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    # Started by the first spawn otherwise, and its start unblocks signals on this thread.
    resource_tracker.ensure_running()
    over = threading.Event()
    handled = (*STOP_SIGNALS, signal.SIGQUIT)  # the agent puts a handler on SIGQUIT and leaves it there
    before = {number: signal.getsignal(number) for number in handled}
    bystander = threading.Thread(target=_stand_by, args=(over,), name="boost-signals", daemon=True)
    for number in STOP_SIGNALS:
        signal.signal(number, send_on)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    bystander.start()
    try:
        yield received
    finally:
        over.set()
        bystander.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _stand_by(over: threading.Event) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    over.wait()


def read_reports(folder: Path) -> list[Report]:
    """The reports of the processes that could write one, the earliest first."""
    reports = [Report(**json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("report*.json")]
    return sorted(reports, key=lambda report: report.time)


def root_cause(failed_rank: int, reports: list[Report]) -> Report | None:
    """The report that the others follow from; None if process `failed_rank`, which failed first, died without a word.

    An error for the user counts before everything; such a death explains the defects and lost connections that others
    report from their collectives; a lost connection explains nothing, unless there is nothing else.
    """
    silent = failed_rank not in {report.rank for report in reports}
    for kind in ("boost",) if silent else ("boost", "defect", "lost"):
        for report in reports:
            if report.kind == kind:
                return report
    return None


def _say_root_cause(call: _Call, failed: _Failed, reports: list[Report], received: list[int]) -> int:
    if signal.SIGINT in received and failed.exit_code in (-signal.SIGINT, _STOPPED_EXIT + signal.SIGINT):
        raise KeyboardInterrupt
    report = root_cause(failed.rank, reports)
    if report is None:
        raise _killed(call, failed, received)
    if report.kind == "defect":
        print(f"{_place(call, report.rank)} failed:\n{report.message}", file=sys.stderr, flush=True)
        return 1
    error: BoostError = getattr(errors, report.error)(report.message)
    if report.kind == "lost":
        error = TrainingError(f"{_place(call, report.rank)} lost another one: {report.message}; {_way_out(call)}")
    error.exit_code = report.exit_code
    error.add_note(f"in {_place(call, report.rank)}:\n{report.trace}")
    raise error


def _killed(call: _Call, failed: _Failed, received: list[int]) -> BoostError:
    """The error for a process that ended without a word."""
    number = -failed.exit_code
    if number in received:
        name = signal.Signals(number).name
        error = TrainingError(f"stopped by {name} while starting up or ending; what was saved before is intact")
        error.exit_code = _STOPPED_EXIT + number
        return error
    how = f"was ended by {_signal_name(number)}" if number > 0 else f"ended with exit code {failed.exit_code}"
    hint = " (out of memory?)" if number == signal.SIGKILL else ""
    others = "; the others were stopped" if call.nproc > 1 else ""
    return TrainingError(f"{_place(call, failed.rank)} {how}{hint}{others}; {_way_out(call)}")


def _place(call: _Call, rank: int) -> str:
    return f"process {rank + 1} of {call.nproc} (rank {rank})"


def _way_out(call: _Call) -> str:
    logs = f"; logs: {call.log_dir}" if call.log_dir else ""
    return f"resume with --resume auto{logs}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# The processes


def _process(call: _Call) -> int:
    """One process, from its first line to its last. It never lets an exception out: the agent would print it."""
    rank = int(os.environ["RANK"])
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    threading.Thread(target=_watch_launcher, args=(call,), name="boost-launcher-watch", daemon=True).start()
    if rank and call.log_dir:
        _send_output_to(call.log_dir / f"rank{rank}.out")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    stop = call.folder / "stop"
    if stop.exists():
        os.kill(os.getpid(), int(stop.read_text(encoding="ascii")))
    try:
        code = call.entry(*call.args)
    except KeyboardInterrupt:
        _leave(_STOPPED_EXIT + signal.SIGINT)
    except BaseException as error:
        _fail(call, rank, error)
    if os.getppid() != call.launcher:
        # Nobody is left to take the result from, nor to clear up.
        shutil.rmtree(call.folder, ignore_errors=True)
        _leave(code)
    for number in STOP_SIGNALS:
        signal.signal(number, _leave_soon)
    return code


def _fail(call: _Call, rank: int, error: BaseException) -> None:
    """Leaves a report and exits."""
    report = describe(error, rank)
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
        # The agent ends this wait by its SIGTERM as soon as it has seen the cause.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(CONSEQUENCE_WAIT_S)
    _leave(report.exit_code)


def describe(error: BaseException, rank: int) -> Report:
    """The report of `error`, raised in process `rank`."""
    trace = "".join(traceback.format_exception(error))
    now = time.time()
    lost = is_lost_connection(error) or (isinstance(error, BoostError) and is_lost_connection(error.__cause__))
    if lost:
        return Report(rank, "lost", _first_sentence(error), "TrainingError", TrainingError.exit_code, trace, now)
    if isinstance(error, OSError):
        line = f"{error.filename or 'file system'}: {error.strerror or error}"
        return Report(rank, "boost", line, "StorageError", StorageError.exit_code, trace, now)
    if isinstance(error, BoostError):
        name = next(base.__name__ for base in type(error).__mro__ if base.__module__ == errors.__name__)
        return Report(rank, "boost", str(error), name, error.exit_code, trace, now)
    return Report(rank, "defect", trace, "BoostError", 1, trace, now)


def _first_sentence(error: BaseException) -> str:
    """Gloo's messages begin with a file of its own and end with advice."""
    text = re.sub(r"^\[[^\]]*\]\s*", "", str(error).strip()).split("\n")[0]
    return re.split(r"\.\s", text)[0] or type(error).__name__


def is_lost_connection(error: BaseException | None) -> bool:
    """Whether `error` says that another process is gone or silent: a collective's, not the root cause."""
    if isinstance(error, ConnectionError | DistError):
        return True
    return isinstance(error, RuntimeError | OSError) and _LOST_CONNECTION.search(str(error)) is not None


def _leave(code: int) -> None:
    """Exits without the interpreter's end, where a broken process group can hang for ever."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _leave_soon(number: int, frame: FrameType | None) -> None:
    """A stop signal after the work: leave in peace, but not before the agent's pipe has the result (it would wait)."""
    timer = threading.Timer(0.5, _leave, (0,))
    timer.daemon = True
    timer.start()


def _send_output_to(path: Path) -> None:
    """Appends stdout and stderr, also of C code, to `path`. Where that fails they stay: rank 0 will say that error."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab") as file:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)


def _watch_launcher(call: _Call) -> None:
    """Ends this process after its launcher: by a request to stop first, by force if it is stuck in a collective."""
    while os.getppid() == call.launcher:
        time.sleep(0.5)
    shutil.rmtree(call.folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(call.orphan_grace_s)
    os._exit(1)
