"""Failure analysis: turns an exception into one line for the user, and finds the root cause among several processes' failures.

Failures are classified by exception type, then by the exact messages of gloo, NCCL, c10d and the allocators. Any other
failure is a bug and keeps its traceback. For example, "CUDA error: the launch timed out" does not mean a lost connection.
"""

import contextlib
import json
import re
import signal
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.distributed import DistBackendError, DistNetworkError, DistStoreError

from boost import errors
from boost.errors import BoostError, ExcludedError, HangError, TrainingError
from boost.format import format_bytes
from boost.train.agreement import PeersLostError

_LOST_GLOO = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|Connection refused|Software caused connection abort|"
    r"No route to host|Connection timed out|"
    r"Timed out waiting \d+ms for (send|recv) operation to complete|Application timeout caused pair closure|"
    r"Rank \d+ (successfully reached|failed to pass) monitoredBarrier|Connect timeout|Gloo connectFullMesh failed"
)
"""Messages in gloo's RuntimeError when the peer is gone or not responding."""

_LOST_NCCL = re.compile(
    r"remote process exited or there was a network error|NCCL communicator was aborted|"
    r"Watchdog caught collective operation timeout|ncclRemoteError|"
    r"(?:Connect to|Connection to|recv from|send to) \S+ failed|Connection closed by remote peer"
)
"""Messages in NCCL's DistBackendError in the same case. "invalid usage" and "internal error" are this process's own errors."""

_CPU_MEMORY = re.compile(
    r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory): you tried to allocate (\d+) bytes"
)
_CUDA_MEMORY = re.compile(r"Tried to allocate ([\d.]+ [KMGT]iB)")
_CUDA_DEVICE = re.compile(r"GPU \d+ has a total capacity of ([\d.]+ [KMGT]iB)")


def is_lost_connection(error: BaseException | None) -> bool:
    """Whether `error` means that another process is gone or not responding. This is a symptom, not the root cause."""
    if isinstance(error, DistNetworkError | DistStoreError):
        return "EADDRINUSE" not in str(error)
    if isinstance(error, PeersLostError):
        return True
    if isinstance(error, DistBackendError):
        return _LOST_NCCL.search(str(error)) is not None
    return type(error) is RuntimeError and _LOST_GLOO.search(str(error)) is not None


def is_timeout(error: BaseException | None) -> bool:
    """Whether a lost connection was detected by a timeout."""
    return re.search("timed out|timeout", str(error), re.IGNORECASE) is not None


def out_of_memory(error: BaseException) -> str | None:
    """A description of the failed allocation if `error` is an out-of-memory error; else None."""
    if isinstance(error, torch.OutOfMemoryError):
        requested, capacity = _CUDA_MEMORY.search(str(error)), _CUDA_DEVICE.search(str(error))
        size = f" of {requested[1]}" if requested else ""
        return f"out of GPU memory: an allocation{size} failed{f' (capacity {capacity[1]})' if capacity else ''}"
    if isinstance(error, RuntimeError) and (found := _CPU_MEMORY.search(str(error))):
        return f"out of memory: an allocation of {format_bytes(int(found[1]))} failed"
    return "out of memory" if isinstance(error, MemoryError) else None


def first_sentence(error: BaseException) -> str:
    """The first sentence of an error message. gloo's messages start with a source location and end with advice."""
    text = re.sub(r"^\[[^\]]*\]\s*", "", str(error).strip()).split("\n")[0]
    return re.split(r"\.\s", text)[0] or type(error).__name__


def how_it_ended(code: int, hint: str = " (out of memory?)") -> str:
    """How a process ended, by its exit code; negative: the signal that killed it. `hint`: added after SIGKILL."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"was killed by {name}{hint if -code == signal.SIGKILL else ''}"


@dataclass(frozen=True)
class FailureReport:
    """One process's failure, stored as a JSON file in the shared folder."""

    rank: int
    kind: str
    """boost: an error that the user can fix; hung: a process that does not respond, reported by another one; excluded: a replica
    that the others left behind, or that has no replica to join; lost: a broken connection to another process; defect: any other
    error, that is, a bug."""
    message: str
    """One line; for a defect, the traceback."""
    error: str
    """Name of the exception class to raise, from boost.errors."""
    exit_code: int
    trace: str
    time: float
    """Seconds since the epoch."""

    def write(self, folder: Path) -> bool:
        """Writes the report to `folder`, where the launcher reads it. Returns whether this succeeded."""
        partial = folder / f"partial{self.rank}"
        with contextlib.suppress(OSError):
            partial.write_text(json.dumps(asdict(self)), encoding="utf-8")
            partial.rename(folder / f"report{self.rank}.json")
            return True
        return False


def failure_report(error: BaseException, rank: int) -> FailureReport:
    trace = "".join(traceback.format_exception(error))
    kind, name, code = "boost", type(error).__name__, BoostError.exit_code
    if isinstance(error, HangError):
        kind, message, code = "hung", str(error), error.exit_code
    elif isinstance(error, ExcludedError):
        kind, message, code = "excluded", str(error), error.exit_code
    elif what := out_of_memory(error) or errors.system_limit(error):
        what = errors.explained(error) if isinstance(error, BoostError) else what
        message, name, code = f"process {rank + 1} (rank {rank}): {what}", "TrainingError", TrainingError.exit_code
    elif is_lost_connection(error) or (isinstance(error, BoostError) and is_lost_connection(error.__cause__)):
        kind, message, name, code = "lost", first_sentence(error), TrainingError.__name__, TrainingError.exit_code
    elif isinstance(error, BoostError):
        name = next(base.__name__ for base in type(error).__mro__ if base.__module__ == errors.__name__)
        message, code = str(error), error.exit_code
    elif isinstance(error, OSError):
        known = errors.system_error(error)
        message, name, code = str(known), type(known).__name__, known.exit_code
    else:
        kind, message, name, code = "defect", trace, "BoostError", 1
    return FailureReport(rank, kind, message, name, code, trace, time.time())


def read_reports(folder: Path) -> list[FailureReport]:
    """Reads the reports from all processes, earliest first."""
    reports = []
    with contextlib.suppress(OSError):  # the exit codes still tell which processes failed
        for path in folder.glob("report*.json"):
            reports.append(FailureReport(**json.loads(path.read_text(encoding="utf-8"))))
    return sorted(reports, key=lambda report: report.time)


def root_cause(failed: Mapping[int, int], reports: list[FailureReport]) -> FailureReport | int:
    """The report that names the root cause, or the rank of a process that died without a report.

    `failed`: exit codes by rank of the processes that failed on their own. Order of precedence: a user error; a process
    that died without a report (the others then report only broken collectives); a bug; a hung process; a replica
    excluded because of any of these; a lost connection.
    """
    silent = sorted(failed.keys() - {report.rank for report in reports})
    by_kind = {kind: [r for r in reports if r.kind == kind] for kind in ("boost", "defect", "hung", "excluded", "lost")}
    if by_kind["boost"]:
        return by_kind["boost"][0]
    if silent:
        return silent[0]
    return next(found[0] for found in by_kind.values() if found)
