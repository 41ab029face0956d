"""Checks that the processes of other replicas respond."""

import math
import threading
import time

from boost.elastic.membership import DEAD, SILENT, Member
from boost.train.heartbeat import Board

WATCH_S = 0.25
"""Interval at which the store is polled for membership changes, in seconds."""
WAITS_S = 2.0
"""Time for which a process waits in a collective before it checks whether the other replicas respond, in seconds."""


class MemberBeats:
    """Tracks which members respond, by the heartbeats of their processes. Thread-safe."""

    def __init__(self, board: Board, slots: int, processes: int, timeout_s: float) -> None:
        self.board, self._slots, self._processes, self._timeout_s = board, slots, processes, timeout_s
        self._seen: dict[int, tuple[str, int, float]] = {}
        self._read_at = 0.0
        self._lock = threading.Lock()

    def status(self, member: Member) -> str:
        """DEAD if a newer incarnation of the replica sends heartbeats, because a launcher ends the old one first.
        SILENT if one of the member's processes sent no heartbeat for run.heartbeat_timeout_s while this process was watching.
        Else ''."""
        with self._lock:
            if time.monotonic() - self._read_at > WATCH_S:
                self._read()
            if self._is_other(member):
                self._read()  # the replica has just started: earlier heartbeats may be its predecessor's
            if self._is_other(member):
                return DEAD
            oldest = min((since for _, _, since in self._of(member)), default=math.inf)
            return SILENT if time.monotonic() - oldest > self._timeout_s else ""

    def _read(self) -> None:
        beats, now = self.board.read(self._slots), time.monotonic()
        if now - self._read_at > 2 * WAITS_S:
            self._seen = {}  # this process was not watching, or the store stalled: an old entry does not mean silence
        self._read_at = now
        for beat in beats:
            if self._seen.get(beat.rank, ("", -1))[:2] != (beat.incarnation, beat.count):
                self._seen[beat.rank] = beat.incarnation, beat.count, now

    def _of(self, member: Member) -> list[tuple[str, int, float]]:
        slots = range(member.replica * self._processes, (member.replica + 1) * self._processes)
        return [self._seen[slot] for slot in slots if slot in self._seen]

    def _is_other(self, member: Member) -> bool:
        return any(name != member.incarnation for name, _, _ in self._of(member))
