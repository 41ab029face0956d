"""Heartbeats: each process publishes its activity, so that a report of a hang can name the process, line and collective.

A thread in each process publishes a `Beat` every second: its phase, step, line of code, and latest collectives, read from c10d's
flight recorder (gloo and NCCL; no overhead per collective). On one machine, heartbeats are files in the launcher's folder;
under torchrun, they are keys in the run's store. A process reads them when a wait nears its phase's timeout. After the timeout, it
names the processes that send no heartbeats or, if all send them, those that have not reached the collective that it waits for.

A process that is suspended (SIGSTOP), swapped out or lost with its machine sends no heartbeats. One that loops or sleeps in Python
still sends them.
"""

import contextlib
import enum
import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from boost.config.schema import RunConfig
from boost.parallel.exchange import last_exchanges
from boost.parallel.mesh import Mesh, set_timeout
from boost.train.best_effort import best_effort
from boost.train.rendezvous import launch_dir

log = logging.getLogger("boost")

INTERVAL_S = 1.0
"""Interval between heartbeats, in seconds."""

SILENCE_S = 3.5
"""Seconds without a heartbeat after which a process is unresponsive if another process has waited for the whole timeout."""

RESUMED_S = 30.0
"""Seconds after a suspension of all processes in which it explains connections that time out."""

WATCH_MARGIN_S = 2.0
"""Seconds past the timeout after which the thread reports a hang, if the backend has not raised an error by then."""

NCCL_MARGIN_S = 8.0
"""Seconds past the timeout of a phase after which NCCL aborts the process. The heartbeat thread must report before that."""

_BEAT_BYTES = 4096
"""Size of a heartbeat file in bytes; larger ones are rare."""

_BYTES = {"Double": 8, "Long": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2, "Short": 2}


class Phase(enum.StrEnum):
    """A phase of a run; each phase has its own timeout."""

    START_UP = "start-up"
    STEP = "step"
    EVALUATION = "evaluation"
    SAVE = "save"


@dataclass(frozen=True)
class Issued:
    """The latest collective that a process issued in a group."""

    operation: str
    """c10d's name, such as 'all_reduce'."""
    sequence: int
    """Sequence number within the group, the same on all of its processes."""
    group: str
    bytes: int
    point_to_point: bool = False

    def __str__(self) -> str:
        size = f" ({self.bytes} bytes)" if self.bytes else ""
        return f"{self.operation} #{self.sequence} of group '{self.group}'{size}"


@dataclass(frozen=True)
class Beat:
    """A heartbeat: what a process was doing when the heartbeat was published."""

    rank: int
    count: int
    """Number of heartbeats so far. A count that does not grow means silence, so clocks need not be synchronized."""
    phase: str = Phase.START_UP
    step: int = 0
    where: str = ""
    """The innermost line of boost code in the main thread's stack."""
    left: bool = False
    """Whether the process has ended normally, so that this is its last heartbeat."""
    saving: bool = False
    """Whether the process is writing a checkpoint, in the main thread or in the background."""
    last: str | None = None
    """Group of the most recent collective."""
    issued: dict[str, Issued] = field(default_factory=dict)
    """Latest collective in each group, by group name."""
    incarnation: str = ""
    """Name of this incarnation of the process, if processes are restarted within a run."""
    pace: float = 0.0
    """Seconds per micro-batch of the latest forward and backward passes; 0 if unknown."""
    pid: int = 0
    stopped_s: float = 0.0
    """How long the process was suspended, in seconds, until at most `RESUMED_S` ago; 0 if it was not."""

    @staticmethod
    def parse(text: str) -> "Beat":
        """Inverse of `json.dumps(asdict(beat))`. Raises ValueError for any other text."""
        return _BEAT.validate_json(text)


_BEAT = TypeAdapter(Beat)


class FolderBoard:
    """Heartbeats as files in a local folder. Overwriting them in place needs no disk space, so no process appears
    dead when the disk is full."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def post(self, rank: int, text: str) -> None:
        descriptor = os.open(self._folder / f"beat{rank}", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            size = max(os.fstat(descriptor).st_size, _BEAT_BYTES)
            os.pwrite(descriptor, text.encode().ljust(size), 0)
        finally:
            os.close(descriptor)

    def read(self, size: int) -> list[Beat]:
        """The latest heartbeat from every process that has published one."""
        return read_beats(self._folder)


def read_beats(folder: Path) -> list[Beat]:
    """The heartbeats in the folder that the launcher shares with its processes, sorted by rank."""
    beats = []
    with contextlib.suppress(OSError):  # a folder that cannot be listed blames no process
        for path in folder.glob("beat[0-9]*"):
            for _ in range(3):
                with contextlib.suppress(OSError, ValueError):  # being overwritten, or removed
                    beats.append(Beat.parse(path.read_text(encoding="utf-8")))
                    break
                time.sleep(1e-3)
    return sorted(beats, key=lambda beat: beat.rank)


class StoreBoard:
    """Heartbeats as keys in the run's store, over a separate connection, because the main thread's may be blocked."""

    def __init__(self, store: dist.Store) -> None:
        self._store: dist.Store = store.clone()  # type: ignore[attr-defined]
        self._store.set_timeout(timedelta(seconds=SILENCE_S))
        self._is_lost = False
        """Whether the connection has failed: c10d does not reconnect, and prints a C++ stack for each further request."""

    def post(self, rank: int, text: str) -> None:
        if not self._is_lost:
            self._is_lost = True
            self._store.set(f"beat/{rank}", text)
            self._is_lost = False

    def read(self, size: int) -> list[Beat]:
        beats = []
        for key in (f"beat/{rank}" for rank in range(size)):
            if self._store.check([key]):
                with contextlib.suppress(ValueError):  # any client of the store can write to it
                    beats.append(Beat.parse(self._store.get(key).decode()))
        return beats


Board = FolderBoard | StoreBoard
"""Publishes and reads heartbeats."""


def board_of(store: dist.Store | None) -> Board:
    """Where a run's processes publish heartbeats: the launcher's folder or, without one, the run's store (None: torch's)."""
    folder = launch_dir()
    return FolderBoard(folder) if folder else StoreBoard(store or dist.distributed_c10d._get_default_store())


# This process's state. There is only one run at a time, because torch has one default process group.


@dataclass
class _State:
    phase: Phase = Phase.START_UP
    step: int = 0
    background_save: bool = False
    pace: float = 0.0


_state = _State()
_current: "Heartbeat | None" = None


@contextlib.contextmanager
def in_phase(phase: Phase) -> Iterator[None]:
    """Context manager that puts this process in `phase` and applies that phase's timeout to collectives."""
    before = _state.phase
    enter(phase)
    try:
        yield
    finally:
        enter(before)


def enter(phase: Phase, step: int | None = None) -> None:
    """Sets this process's phase; `step` is the current step's number."""
    if step is not None:
        _state.step = step
    if phase != _state.phase:
        _state.phase = phase
        apply_timeout()


def apply_timeout() -> None:
    """Applies the timeout of the current phase to later collectives, also of process groups created during it, and publishes the
    phase."""
    if _current is not None:
        set_timeout(_current.timeout_s + _current.margin_s)
        _current.wake.set()


def set_pace(seconds: float) -> None:
    """Records how long the latest passes took, in seconds per micro-batch."""
    _state.pace = seconds


@contextlib.contextmanager
def background_save() -> Iterator[None]:
    """Context manager in which a background thread writes a checkpoint, regardless of the main thread's phase."""
    _state.background_save = True
    try:
        yield
    finally:
        _state.background_save = False


class Heartbeat:
    """Context manager around a run: publishes this process's heartbeats and detects hangs.

    If another process keeps this one from making progress for longer than the timeout, the heartbeat thread calls `on_hang` with a
    one-line diagnosis. `on_hang` should end the process, because the main thread is blocked in a collective.
    """

    def __init__(
        self,
        mesh: Mesh,
        run: RunConfig,
        on_hang: Callable[[str], None],
        store: dist.Store | None = None,
        incarnation: str = "",
    ) -> None:
        """`store`: the run's, by default torch's (`board_of`). `incarnation`: see `Beat`."""
        self.rank, self.size = mesh.rank, mesh.size
        self._store, self._incarnation = store, incarnation
        self.margin_s = NCCL_MARGIN_S if mesh.device.type == "cuda" else 0.0
        self._timeouts = {
            Phase.START_UP: run.startup_timeout_s,
            Phase.STEP: run.timeout_s,
            Phase.EVALUATION: run.eval_timeout_s,
            Phase.SAVE: run.save_timeout_s,
        }
        self._on_hang = on_hang
        self._main = threading.main_thread().ident
        self._over = False
        self.wake = threading.Event()
        self._count = 0
        self._board: Board | None = None
        self._is_store_silent = False
        """Whether the store has failed to respond since the latest progress."""
        self._earlier: tuple[float, dict[int, int]] | None = None
        self._slept_at = self._resumed_at = time.monotonic()
        self._stopped_s = 0.0
        self._thread = threading.Thread(target=self._run, name="boost-heartbeat", daemon=True)

    def __enter__(self) -> "Heartbeat":
        global _current
        _state.phase, _state.step = Phase.START_UP, 0
        if self.size > 1:
            _current = self
            self._board = board_of(self._store)
            with best_effort("write heartbeats"):
                self._post()
            set_timeout(self.timeout_s + self.margin_s)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        global _current
        _current = None
        self._over = True
        self.wake.set()
        if self._thread.is_alive():
            self._thread.join(SILENCE_S if kind else 60)  # after an error, the thread's connection may hang
        if self._board is not None and not self._thread.is_alive():
            with contextlib.suppress(OSError, RuntimeError):
                self._post(left=True)

    @property
    def timeout_s(self) -> float:
        return self._timeouts[_state.phase]

    def diagnose(self, waited: bool = True) -> str | None:
        """One line with the names of the processes that this one waits for; None if no process is at fault. `waited`: whether this
        process waited for the whole timeout; False if its connection was lost earlier.

        Takes up to `SILENCE_S` seconds; less if the thread has already taken a first reading, before the timeout.
        """
        if self._board is None and not self._is_store_silent:
            return None
        waiting = self._beat()
        if time.monotonic() - self._slept_at > SILENCE_S:
            self._earlier = None  # this process was suspended since, perhaps with all others
        while (earlier := self._earlier or self._counts()) is not None:
            began, before = earlier
            time.sleep(max(0.0, began + SILENCE_S - time.monotonic()))
            if (beats := self._read()) is None:
                break
            message = hang_message(waiting, beats, before, self.size, self.timeout_s if waited else None)
            if message or self._earlier is None:
                return message
            self._earlier = None  # the process may have stopped after that reading, so take another one
        # The store is not responding. Rank 0 hosts it, unless torchrun does.
        if self.rank == 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or launch_dir():
            log.warning("heartbeats cannot be read")
            return None
        host = f"{process_name(0, self.size)}, which hosts the run's store, is not responding"
        return f"{host}; {_waits(waiting, self.size, self.timeout_s if waited else None)}"

    def _counts(self) -> tuple[float, dict[int, int]] | None:
        """The time, and each process's heartbeat count by rank. None if the heartbeats cannot be read."""
        beats = self._read()
        return None if beats is None else (time.monotonic(), {beat.rank: beat.count for beat in beats})

    def _read(self) -> list[Beat] | None:
        """All heartbeats. None if the store fails or is not responding; c10d's client would wait forever for a stopped host."""
        board = self._board
        answers: list[list[Beat]] = []
        if board is None:
            return None

        def read() -> None:
            with contextlib.suppress(OSError, RuntimeError):
                answers.append(board.read(self.size))

        reader = threading.Thread(target=read, name="boost-heartbeat-read", daemon=True)
        reader.start()
        reader.join(SILENCE_S)
        if not answers:
            self._board, self._is_store_silent = None, True  # the connection may stay blocked forever
            return None
        return answers[0]

    def _beat(self, left: bool = False) -> Beat:
        last, issued = latest_collectives()
        frame = sys._current_frames().get(self._main or 0)
        saving = _state.background_save or _state.phase == Phase.SAVE
        where = innermost_line(frame)
        facts = (self.rank, self._count, _state.phase, _state.step, where, left, saving, last, issued)
        return Beat(*facts, self._incarnation, _state.pace, os.getpid(), self._stopped_s)

    def _post(self, left: bool = False) -> Beat:
        self._count += 1
        beat = self._beat(left)
        if self._board is not None:
            self._board.post(self.rank, json.dumps(asdict(beat)))
        return beat

    def _run(self) -> None:
        progress: object = None
        since = seen = time.monotonic()
        while not self._over:
            self._slept_at = time.monotonic()
            self.wake.wait(INTERVAL_S)
            self.wake.clear()
            now = time.monotonic()
            if now - self._slept_at > SILENCE_S:
                self._stopped_s, self._resumed_at = now - self._slept_at, now
            elif now - self._resumed_at > RESUMED_S:
                self._stopped_s = 0.0
            try:
                beat = self._post()
            except (OSError, RuntimeError) as error:  # the store's host is gone; the collectives will fail too
                log.debug("no heartbeat: %s", error)
                beat = self._beat()
            now, before = time.monotonic(), progress
            progress = (beat.phase, beat.step, beat.issued)
            if progress != before:
                self._is_store_silent = False  # the store was not the reason for the wait
            if progress != before or now - seen > SILENCE_S:
                # Either there was progress, or this process was suspended for a while, perhaps with all others.
                since = now
                self._earlier = None
            seen = now
            if self._earlier is None and now - since > self.timeout_s - SILENCE_S - INTERVAL_S:
                self._earlier = self._counts()
            if now - since > self.timeout_s + WATCH_MARGIN_S:
                message = self.diagnose()
                if message and not self._over:
                    self._on_hang(message)
                self._earlier, since = None, time.monotonic()


_reading = threading.Lock()
_latest: tuple[str | None, dict[str, Issued]] = (None, {})


@contextlib.contextmanager
def recorder_unread() -> Iterator[None]:
    """Context manager around the capture of a CUDA graph. The recorder holds the events of coalesced NCCL collectives, also of
    captured ones. Reading it asks for their state, which spoils a capture, and is an error afterwards."""
    with _reading:
        yield
        if forget := getattr(torch._C._distributed_c10d, "_reset_fr_recording_nccl", None):
            forget()


def latest_collectives() -> tuple[str | None, dict[str, Issued]]:
    """The group of the most recent collective, and each group's latest recorded collective by group name. During a capture, those
    before it."""
    global _latest
    if _reading.acquire(blocking=False):
        try:
            _latest = _recorded_collectives()
        finally:
            _reading.release()
    return _latest


def _recorded_collectives() -> tuple[str | None, dict[str, Issued]]:
    issued: dict[str, Issued] = {}
    last, newest = None, -1
    for dump in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        read = getattr(torch._C._distributed_c10d, dump, None)
        entries = json.loads(read()).get("entries", []) if read else []
        for entry in entries:
            name, description = entry["process_group"]
            kind = entry["profiling_name"].rpartition(":")[2]
            peer_to_peer = bool(entry["is_p2p"])
            sequence = entry["p2p_seq_id" if peer_to_peer else "collective_seq_id"]
            inputs = zip(entry.get("input_sizes") or (), entry.get("input_dtypes") or (), strict=False)
            size = sum(math.prod(shape) * _BYTES.get(dtype, 1) for shape, dtype in inputs)
            issued[name] = Issued(kind, sequence, _label(name, description), size, peer_to_peer)
            if entry["time_created_ns"] >= newest:
                last, newest = name, entry["time_created_ns"]
    for name, exchange in list(last_exchanges.items()):
        key = f"{name}, exchanges"  # numbered separately from gloo's own collectives in the group
        issued[key] = Issued(exchange.operation, exchange.sequence, _label(name, exchange.group), exchange.bytes)
        if exchange.time_ns >= newest:
            last, newest = key, exchange.time_ns
    return last, issued


def _label(name: str, description: str) -> str:
    """A group's name in messages."""
    label = description.removeprefix("mesh_") if description not in ("", "undefined") else name
    return "all" if label == "default_pg" else label


def innermost_line(frame: FrameType | None) -> str:
    """The innermost stack frame inside this package, such as 'parallel/gradients.py:91 in finish'."""
    package = str(Path(__file__).parent.parent)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(package):
            return f"{os.path.relpath(name, package)}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


# Diagnosis


def process_name(rank: int, size: int) -> str:
    """A process's name in messages."""
    return f"process {rank + 1} of {size} (rank {rank})"


def hang_message(
    waiting: Beat, beats: Sequence[Beat], before: dict[int, int], size: int, timeout_s: float | None
) -> str | None:
    """Names the processes that `waiting` waits for: those whose heartbeat count has not changed since `before`; if none, those that
    have not reached its collective, unless all processes were suspended. `timeout_s`: the timeout that expired; None if `waiting`
    lost its connection earlier.

    Returns None if every process sends heartbeats and has reached the collective. The cause is then the network or work that takes
    longer than the timeout.
    """
    others = [beat for beat in beats if beat.rank != waiting.rank and not beat.left]
    silent = [beat for beat in others if beat.count == before.get(beat.rank)]
    if not silent and len(beats) == size and (stopped_s := min(beat.stopped_s for beat in beats)):
        return (
            f"all {size} processes were stopped for about {stopped_s:.0f} s, for example with their job or machine, so connections "
            f"timed out; {_waits(waiting, size, timeout_s)}"
        )
    mine, behind = waiting.issued.get(waiting.last or ""), []
    if mine is not None and not mine.point_to_point:
        for beat in others:
            theirs = beat.issued.get(waiting.last or "")
            if theirs is not None and not theirs.point_to_point and theirs.sequence < mine.sequence:
                behind.append(beat)
    for blamed, what in ((silent, "is not responding"), (behind, "is behind the other processes")):
        names = []
        for beat in blamed:
            seen = [f"step {beat.step}", f"phase {beat.phase}"]
            seen += [f"at {beat.where}"] if beat.where else []
            seen += [f"last collective {last}"] if (last := beat.issued.get(beat.last or "")) else []
            names.append(f"{process_name(beat.rank, size)} {what} (last seen in {', '.join(seen)})")
        if names:
            return f"{'; '.join(names)}; {_waits(waiting, size, timeout_s)}"
    return None


def _waits(waiting: Beat, size: int, timeout_s: float | None) -> str:
    """Describes the waiting process. `timeout_s`: None if its connection was lost before the timeout."""
    last = waiting.issued.get(waiting.last or "")
    what = f", in {last}" if last else ""
    did = "lost its connection" if timeout_s is None else f"waited {timeout_s:g} s"
    return f"{process_name(waiting.rank, size)} {did} in step {waiting.step}, phase {waiting.phase}{what}"
