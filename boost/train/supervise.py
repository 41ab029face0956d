"""Replicas of one machine under their launcher (run.recovery = "in-step"): one that fails is ended whole and started again."""

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch.distributed as dist

from boost.parallel.membership import DEAD, Coordinator
from boost.train.failures import read_reports
from boost.train.recovery import INCARNATION
from boost.train.signals import STOP_SIGNALS

log = logging.getLogger("boost")

POLL_S = 0.1
RESTART_S = 0.5
"""Seconds before a replica is started again: an error that all of them have ends the run instead."""
END_S = 30.0
"""Seconds that a replica that is coming back has to end when the run is complete."""


class Supervisor:
    """Watches the processes of all replicas until the run is complete or nobody can go on."""

    def __init__(
        self,
        folder: Path,
        replicas: Sequence[Sequence[int]],
        restarts: int,
        start: Callable[[int], BaseProcess],
        processes: list[BaseProcess],
        received: Sequence[int],
    ) -> None:
        """`replicas`: the ranks of each; `start` starts the process of a rank; `processes` by rank, which this changes; `received`:
        signals to the launcher so far."""
        self._folder, self._replicas, self._restarts = folder, replicas, restarts
        self._start, self._processes, self._received = start, processes, received
        store = dist.FileStore(str(folder / "members"), -1)
        self._coordinator = Coordinator(store, len(replicas), len(replicas[0]))
        self._starts = [0] * len(replicas)
        self._due: dict[int, float] = {}
        """When a replica is to be started again."""
        self._failed: dict[int, int] = {}
        """Exit codes by rank, of those that failed and were not started again since."""

    def start_all(self) -> None:
        """Starts every process."""
        self._processes[:] = [None] * sum(map(len, self._replicas))  # type: ignore[list-item]
        for replica in range(len(self._replicas)):
            self._start_replica(replica)

    def supervise(self, aborted: Callable[[], bool]) -> dict[int, int]:
        """Returns the exit codes of what failed, if nobody could go on; nothing if the run is complete. Ends no process then."""
        complete_at: float | None = None
        while running := [process for process in self._processes if process.exitcode is None]:
            connection.wait([process.sentinel for process in running], POLL_S)
            if aborted():
                return self._failed
            for replica in range(len(self._replicas)):
                self._look(replica)
            if self._failed and self._nobody_is_left():
                self._collect()
                return self._failed
            for replica, when in list(self._due.items()):
                if time.monotonic() >= when and not self._is_ending():
                    del self._due[replica]
                    self._start_replica(replica)
            if complete_at is None and any(process.exitcode == 0 for process in self._processes):
                complete_at = time.monotonic()
            if complete_at is not None and time.monotonic() - complete_at > END_S:
                break
        for replica in range(len(self._replicas)):
            self._look(replica)
        complete = any(process.exitcode == 0 for process in self._processes)
        return {} if complete else self._failed

    def _is_ending(self) -> bool:
        return any(number in STOP_SIGNALS for number in self._received) or any(
            process.exitcode == 0 for process in self._processes
        )

    def _incarnation(self, replica: int) -> str:
        return f"{replica}.{self._starts[replica] - 1}"

    def _start_replica(self, replica: int) -> None:
        self._starts[replica] += 1
        os.environ[INCARNATION] = self._incarnation(replica)
        try:
            for rank in self._replicas[replica]:
                for name in (f"report{rank}.json", f"code{rank}"):
                    (self._folder / name).unlink(missing_ok=True)
                self._failed.pop(rank, None)
                self._processes[rank] = self._start(rank)
        finally:
            del os.environ[INCARNATION]

    def _look(self, replica: int) -> None:
        """Ends a replica of which a process has failed, or that the others have left out."""
        if replica in self._due:
            return
        ranks, incarnation = self._replicas[replica], self._incarnation(replica)
        codes = {rank: code for rank in ranks if (code := self._processes[rank].exitcode)}
        why = None if codes else self._coordinator.why_gone(incarnation)
        if not codes and why is None:
            return
        if codes and not set(codes) <= set(self._failed):
            rank, code = min(
                codes.items(), key=lambda each: each[1]
            )  # a signal before an exit code, which may follow from it
            self._coordinator.put_out(incarnation, DEAD, f"rank {rank} {_ended(code)}")
        alive = [rank for rank in ranks if self._processes[rank].exitcode is None]
        for rank in alive:
            self._processes[rank].kill()
        for rank in ranks:
            self._processes[rank].join()
        if why is not None and alive:
            self._coordinator.put_out(incarnation, DEAD, f"{why}, ended by the launcher")
        known = codes or {rank: self._processes[rank].exitcode or 1 for rank in alive}
        if not known or set(known) <= set(self._failed):
            return
        self._failed.update(known)
        if self._starts[replica] <= self._restarts and self._coordinator.latest() is not None:
            self._due[replica] = time.monotonic() + RESTART_S

    def _nobody_is_left(self) -> bool:
        """Whether no replica that has weights runs."""
        latest = self._coordinator.latest()
        if latest is None or latest.refused:  # it failed in start-up, or may not go on
            return True
        return all(self._coordinator.why_gone(member.incarnation) for member in latest.members)

    def _collect(self) -> None:
        """Adds those that end now by themselves: one of them may know why."""
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline and any(process.exitcode is None for process in self._processes):
            time.sleep(POLL_S)
        for rank, process in enumerate(self._processes):
            if process.exitcode:
                self._failed[rank] = process.exitcode
        for report in read_reports(self._folder):
            if report.rank not in self._failed:
                with contextlib.suppress(OSError):
                    (self._folder / f"report{report.rank}.json").unlink()


def _ended(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
