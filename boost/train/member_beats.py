"""Which replicas of a run with in-step recovery respond."""

import math
import threading
import time

from boost.parallel.membership import DEAD, SILENT, Member
from boost.train.heartbeat import Board

WATCH_S = 0.25
"""Interval at which the store is polled for changes of the membership, seconds."""
WAITS_S = 2.0
"""Time that a process waits in a collective before it checks whether the other replicas respond, seconds."""


class MemberBeats:
    """Which members respond, judged by the heartbeats of their processes. Thread-safe."""

    def __init__(self, board: Board, slots: int, processes: int, timeout_s: float) -> None:
        self.board, self._slots, self._processes, self._timeout_s = board, slots, processes, timeout_s
        self._seen: dict[int, tuple[str, int, float]] = {}
        self._read_at = 0.0
        self._lock = threading.Lock()

    def status(self, member: Member) -> str:
        """DEAD if a newer incarnation of the replica sends heartbeats: launchers end one before they start the next. SILENT if a
        process has sent none for run.heartbeat_timeout_s during which this process watched. Else ''."""
        with self._lock:
            if time.monotonic() - self._read_at > WATCH_S:
                self._read()
            if self._is_other(member):
                self._read()  # a replica that has just started: what was read before may be from its predecessor
            if self._is_other(member):
                return DEAD
            oldest = min((since for _, _, since in self._of(member)), default=math.inf)
            return SILENT if time.monotonic() - oldest > self._timeout_s else ""

    def _read(self) -> None:
        beats, now = self.board.read(self._slots), time.monotonic()
        if now - self._read_at > 2 * WAITS_S:
            self._seen = {}  # not watched in between, or the store stalled: an old entry does not mean silence
        self._read_at = now
        for beat in beats:
            if self._seen.get(beat.rank, ("", -1))[:2] != (beat.incarnation, beat.count):
                self._seen[beat.rank] = beat.incarnation, beat.count, now

    def _of(self, member: Member) -> list[tuple[str, int, float]]:
        slots = range(member.replica * self._processes, (member.replica + 1) * self._processes)
        return [self._seen[slot] for slot in slots if slot in self._seen]

    def _is_other(self, member: Member) -> bool:
        return any(name != member.incarnation for name, _, _ in self._of(member))
