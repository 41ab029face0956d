"""Supervises the replicas on one machine (run.recovery = "in-step"): ends all processes of a failed replica and restarts it."""

import contextlib
import logging
import operator
import os
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from boost.config import Config
from boost.elastic.membership import DEAD, Coordinator
from boost.elastic.mesh import ranks_of_replicas
from boost.elastic.recovery import INCARNATION
from boost.train.failures import how_it_ended, read_reports
from boost.train.rendezvous import file_store
from boost.train.signals import STOP_SIGNALS

log = logging.getLogger("boost")

POLL_S = 0.1
RESTART_S = 0.5
"""Delay before a replica is restarted, in seconds. If all replicas fail within this time, the run ends instead."""
END_S = 30.0
"""Time allowed for a restarting replica to exit once the run is complete, in seconds."""


class Supervisor:
    """Watches the processes of all replicas in a run until the run is complete or no replica can continue."""

    def __init__(self, replicas: Sequence[Sequence[int]], restarts: int) -> None:
        """`replicas`: global ranks of each replica. `restarts`: maximum number of restarts per replica."""
        self._replicas, self._restarts = replicas, restarts
        self._starts = [0] * len(replicas)
        self._due: dict[int, float] = {}
        """Time at which a replica is to be restarted, by replica."""
        self._failed: dict[int, int] = {}
        """Exit codes, by rank, of failed processes that have not been restarted."""

    @classmethod
    def of(cls, config: Config) -> "Supervisor":
        return cls(ranks_of_replicas(config.parallel), config.run.replica_restarts)

    def supervise(
        self,
        folder: Path,
        start: Callable[[int], None],
        processes: Mapping[int, BaseProcess],
        received: Sequence[int],
        aborted: Callable[[], bool],
    ) -> dict[int, int]:
        """Starts every process. If one fails, ends its replica, and restarts the replica as long as another one is running
        (implements `boost.train.launch.Supervise`).

        Returns an empty dict if the run is complete, or the exit codes of the failed processes, by rank, if no replica could
        continue. The caller ends the remaining processes.
        """
        self._folder, self._start, self._processes = folder, start, processes
        self._coordinator = Coordinator(file_store(folder / "members"), len(self._replicas), len(self._replicas[0]))
        for replica in range(len(self._replicas)):
            self._start_replica(replica)
        complete_at: float | None = None
        while running := [process for process in processes.values() if process.exitcode is None]:
            connection.wait([process.sentinel for process in running], POLL_S)
            if aborted():
                return self._failed
            for replica in range(len(self._replicas)):
                self._check(replica)
            if self._failed:
                latest = self._coordinator.latest()
                # Startup failed, training cannot continue, or no running replica has weights.
                if (
                    latest is None
                    or latest.refused
                    or set(latest.members) == set(self._coordinator.lost_among(latest.members))
                ):
                    self._collect_failures()
                    return self._failed
            if complete_at is None and any(process.exitcode == 0 for process in processes.values()):
                complete_at = time.monotonic()
            is_ending = complete_at is not None or any(number in STOP_SIGNALS for number in received)
            for replica, when in list(self._due.items()):
                if time.monotonic() >= when and not is_ending:
                    del self._due[replica]
                    self._start_replica(replica)
            if complete_at is not None and time.monotonic() - complete_at > END_S:
                break
        for replica in range(len(self._replicas)):
            self._check(replica)
        complete = any(process.exitcode == 0 for process in processes.values())
        return {} if complete else self._failed

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
                self._start(rank)
        finally:
            del os.environ[INCARNATION]

    def _check(self, replica: int) -> None:
        """Ends a replica if one of its processes has failed or the other replicas have excluded it."""
        if replica in self._due:
            return
        ranks, incarnation = self._replicas[replica], self._incarnation(replica)
        codes = {rank: code for rank in ranks if (code := self._processes[rank].exitcode)}
        why = None if codes else self._coordinator.lost_reason(incarnation)
        if not codes and why is None:
            return
        if codes and not set(codes) <= set(self._failed):
            # Signals (negative codes) come first: an exit code may be a consequence of one.
            rank, code = min(codes.items(), key=operator.itemgetter(1))
            self._coordinator.exclude(incarnation, DEAD, f"rank {rank} {how_it_ended(code, hint='')}")
        alive = [rank for rank in ranks if self._processes[rank].exitcode is None]
        for rank in alive:
            self._processes[rank].kill()
        for rank in ranks:
            self._processes[rank].join()
        if why is not None and alive:
            self._coordinator.exclude(incarnation, DEAD, f"{why}, ended by the launcher")
        known = codes or {rank: self._processes[rank].exitcode or 1 for rank in alive}
        if not known or set(known) <= set(self._failed):
            return
        self._failed.update(known)
        if self._starts[replica] <= self._restarts and self._coordinator.latest() is not None:
            self._due[replica] = time.monotonic() + RESTART_S

    def _collect_failures(self) -> None:
        """Waits briefly for the other processes to exit and adds their failures: one of the reports may name the cause."""
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline and any(process.exitcode is None for process in self._processes.values()):
            time.sleep(POLL_S)
        for rank, process in self._processes.items():
            if process.exitcode:
                self._failed[rank] = process.exitcode
        for report in read_reports(self._folder):
            if report.rank not in self._failed:
                with contextlib.suppress(OSError):
                    (self._folder / f"report{report.rank}.json").unlink()
