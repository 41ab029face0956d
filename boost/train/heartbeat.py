"""A heartbeat per process: what it does right now, so that the others can say which one hangs, where, and in what.

A thread of each process publishes a `Beat` every second: phase, step, line of code, and the latest collectives, which it reads
from c10d's flight recorder (gloo and NCCL alike; nothing is added to a collective's path). On one machine beats are files in the
launcher's folder, under torchrun keys of the run's store. Nobody reads them until a process has waited as long as the
timeout of its phase; it then names the processes that do not beat, or else those that have not reached the collective that it
waits for.

A process that is stopped (SIGSTOP), swapped out or lost with its machine does not beat; one that loops or sleeps in Python does.
"""

import contextlib
import enum
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Protocol

import torch
import torch.distributed as dist

from boost.config.schema import RunConfig
from boost.parallel.exchange import last_exchanges
from boost.parallel.mesh import Mesh, set_timeout
from boost.parallel.rendezvous import launch_dir

log = logging.getLogger("boost")

INTERVAL_S = 1.0
"""Seconds between two beats."""

SILENCE_S = 3.5
"""Seconds without a beat after which a process counts as not responding, once another one has waited for the whole timeout."""

WATCH_MARGIN_S = 2.0
"""Seconds past the timeout after which the thread reports a hang that the backend has not ended."""

NCCL_MARGIN_S = 8.0
"""Seconds past the timeout of a phase until NCCL aborts the process, without naming anybody: the thread should come first."""

_RECORDS = "64"
"""Collectives that the flight recorder remembers, unless TORCH_FR_BUFFER_SIZE says otherwise; it is read every second."""

_BYTES = {"Double": 8, "Long": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2, "Short": 2}


class Phase(enum.StrEnum):
    """What a process is doing; each phase has its own timeout."""

    START_UP = "start-up"
    STEP = "step"
    EVALUATION = "evaluation"
    SAVE = "save"


@dataclass(frozen=True)
class Issued:
    """The latest collective of a group."""

    operation: str
    """As c10d names it, such as 'all_reduce'."""
    sequence: int
    """Number within the group, the same on all its processes."""
    group: str
    bytes: int
    point_to_point: bool = False

    def __str__(self) -> str:
        size = f" ({self.bytes} bytes)" if self.bytes else ""
        return f"{self.operation} #{self.sequence} of group '{self.group}'{size}"


@dataclass(frozen=True)
class Beat:
    """What a process published."""

    rank: int
    count: int
    """Beats so far: a count that does not grow means silence, whatever the clocks of the machines say."""
    phase: str = Phase.START_UP
    step: int = 0
    where: str = ""
    """Innermost line of boost that its main thread runs."""
    left: bool = False
    """Whether it ended by itself and will not beat again."""
    saving: bool = False
    """Whether a checkpoint is being written, here and now or in the background."""
    last: str | None = None
    """Name of the group that issued last."""
    issued: dict[str, Issued] = field(default_factory=dict)
    """By name of the group."""
    incarnation: str = ""
    """With in-step recovery: which start of its replica this process belongs to."""
    pace: float = 0.0
    """Seconds that its latest passes took for each micro-batch; 0: unknown."""
    pid: int = 0

    @classmethod
    def parse(cls, text: str) -> "Beat":
        """Inverse of `json.dumps(asdict(beat))`."""
        values = json.loads(text)
        return cls(**values | {"issued": {name: Issued(**one) for name, one in values["issued"].items()}})


class Board(Protocol):
    """Where processes publish their beats."""

    def post(self, rank: int, text: str) -> None:
        """Replaces what `rank` has posted."""

    def read(self, size: int) -> list[Beat]:
        """What all processes have posted, those that have."""


class FolderBoard:
    """Files in a folder of one machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def post(self, rank: int, text: str) -> None:
        partial = self._folder / f"beating{rank}"
        partial.write_text(text, encoding="utf-8")
        partial.rename(self._folder / f"beat{rank}")

    def read(self, size: int) -> list[Beat]:
        return read_beats(self._folder)


def read_beats(folder: Path) -> list[Beat]:
    """The beats in the folder that the launcher shares with its processes, by rank."""
    beats = []
    for path in folder.glob("beat[0-9]*"):
        with contextlib.suppress(OSError, ValueError):  # it is being replaced, or the folder removed
            beats.append(Beat.parse(path.read_text(encoding="utf-8")))
    return sorted(beats, key=lambda beat: beat.rank)


class StoreBoard:
    """Keys of the run's store. A connection of its own: the main thread may be waiting in the other one."""

    def __init__(self, store: dist.Store) -> None:
        self._store: dist.Store = getattr(store, "clone", lambda: store)()  # older torch: shares the connection
        self._store.set_timeout(timedelta(seconds=SILENCE_S))

    def post(self, rank: int, text: str) -> None:
        self._store.set(f"beat/{rank}", text)

    def read(self, size: int) -> list[Beat]:
        keys = [key for key in (f"beat/{rank}" for rank in range(size)) if self._store.check([key])]
        return [Beat.parse(self._store.get(key).decode()) for key in keys]


# What this process does: one run at a time, as torch has one default process group.


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
    """While open, this process is in `phase`, and collectives have its timeout."""
    before = _state.phase
    enter(phase)
    try:
        yield
    finally:
        enter(before)


def enter(phase: Phase, step: int | None = None) -> None:
    """This process is in `phase` from now on; `step` is the number of the step."""
    if step is not None:
        _state.step = step
    if phase != _state.phase:
        _state.phase = phase
        if _current is not None:
            _current.phase_changed()


def apply_timeout() -> None:
    """Gives groups that were made in the middle of a phase its timeout."""
    if _current is not None:
        _current.phase_changed()


def set_pace(seconds: float) -> None:
    """The latest passes of this process took so long for each micro-batch."""
    _state.pace = seconds


@contextlib.contextmanager
def background_save() -> Iterator[None]:
    """While open, a thread of this process writes a checkpoint, whatever phase the main thread is in."""
    _state.background_save = True
    try:
        yield
    finally:
        _state.background_save = False


class Heartbeat:
    """Publishes what this process does, and watches how long it has been doing it. A context manager around a run.

    `on_hang` is called in the heartbeat's thread, with one line, if the process makes no progress for longer than the timeout
    and another one is to blame; it should end the process, whose main thread waits in a collective.
    """

    def __init__(
        self,
        mesh: Mesh,
        run: RunConfig,
        on_hang: Callable[[str], None],
        board: Callable[[], Board] | None = None,
        incarnation: str = "",
    ) -> None:
        """`board`: where beats are published, by default the launcher's folder or the run's store; `incarnation`: as of `Beat`."""
        self.rank, self.size = mesh.rank, mesh.size
        self._make_board, self._incarnation = board or _board, incarnation
        self._margin = NCCL_MARGIN_S if mesh.device.type == "cuda" else 0.0
        self._timeouts = {
            Phase.START_UP: run.startup_timeout_s,
            Phase.STEP: run.timeout_s,
            Phase.EVALUATION: run.eval_timeout_s,
            Phase.SAVE: run.save_timeout_s,
        }
        self._on_hang = on_hang
        self._main = threading.main_thread().ident
        self._over = False
        self._wake = threading.Event()
        self._count = 0
        self._board: Board | None = None
        self._is_store_silent = False
        """Whether the store has not answered since the latest progress."""
        self._earlier: tuple[float, dict[int, int]] | None = None
        self._thread = threading.Thread(target=self._run, name="boost-heartbeat", daemon=True)

    def __enter__(self) -> "Heartbeat":
        global _current
        _state.phase, _state.step = Phase.START_UP, 0
        if self.size > 1:
            _current = self
            self._board = self._make_board()
            self._post()
            self._apply_timeout()
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        global _current
        _current = None
        self._over = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(SILENCE_S if kind else 60)  # after an error its connection may hang
        if self._board is not None and not self._thread.is_alive():
            with contextlib.suppress(OSError, RuntimeError):
                self._post(left=True)

    @property
    def timeout_s(self) -> float:
        """Timeout of the current phase, in seconds."""
        return self._timeouts[_state.phase]

    def phase_changed(self) -> None:
        """Gives the collectives from now on the timeout of the current phase, and publishes it."""
        self._apply_timeout()
        self._wake.set()

    def _apply_timeout(self) -> None:
        set_timeout(self.timeout_s + self._margin)

    def diagnose(self, waited: bool = True) -> str | None:
        """One line that names the processes for which this one waits, or None if none is to blame. `waited`: for the whole timeout;
        else its connection was lost before.

        Takes `SILENCE_S` seconds, or what is left of them: the thread looks a first time before the timeout.
        """
        if self._board is None and not self._is_store_silent:
            return None
        waiting = self._beat()
        while (earlier := self._earlier or self._counts()) is not None:
            began, before = earlier
            time.sleep(max(0.0, began + SILENCE_S - time.monotonic()))
            if (beats := self._read()) is None:
                break
            found = hang_message(waiting, beats, before, self.size, self.timeout_s if waited else None)
            if found or self._earlier is None:
                return found
            self._earlier = None  # it may have stopped only since then: once more
        return self._without_a_store(waiting, waited)

    def _counts(self) -> tuple[float, dict[int, int]] | None:
        """The time, and how often each process has beaten; None as `_read`."""
        beats = self._read()
        return None if beats is None else (time.monotonic(), {beat.rank: beat.count for beat in beats})

    def _read(self) -> list[Beat] | None:
        """All beats; None if the store fails or does not answer: c10d's client would wait for a stopped host for ever."""
        board = self._board
        found: list[list[Beat]] = []
        if board is None:
            return None

        def read() -> None:
            with contextlib.suppress(OSError, RuntimeError):
                found.append(board.read(self.size))

        reader = threading.Thread(target=read, name="boost-heartbeat-read", daemon=True)
        reader.start()
        reader.join(SILENCE_S)
        if not found:
            self._board, self._is_store_silent = None, True  # the connection may stay busy for ever
            return None
        return found[0]

    def _without_a_store(self, waiting: Beat, waited: bool) -> str | None:
        """Rank 0 hosts the store where torchrun does not."""
        if self.rank == 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or launch_dir():
            log.warning("heartbeats cannot be read")
            return None
        host = f"{process_name(0, self.size)}, which hosts the store of the run, does not respond"
        return f"{host}; {_waits(waiting, self.size, self.timeout_s if waited else None)}"

    def _beat(self, left: bool = False) -> Beat:
        last, issued = latest_collectives()
        frame = sys._current_frames().get(self._main or 0)
        saving = _state.background_save or _state.phase == Phase.SAVE
        where = innermost_line(frame)
        facts = (self.rank, self._count, _state.phase, _state.step, where, left, saving, last, issued)
        return Beat(*facts, self._incarnation, _state.pace, os.getpid())

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
            self._wake.wait(INTERVAL_S)
            self._wake.clear()
            try:
                beat = self._post()
            except (OSError, RuntimeError) as error:  # the store's host has gone; the collectives will say so too
                log.debug("no heartbeat: %s", error)
                beat = self._beat()
            now, before = time.monotonic(), progress
            progress = (beat.phase, beat.step, beat.issued)
            if progress != before:
                self._is_store_silent = False  # it was not why this process waited
            if progress != before or now - seen > SILENCE_S:
                # Progress, or this process was itself stopped for a while, perhaps with all the others.
                since = now
                self._earlier = None
            seen = now
            if self._earlier is None and now - since > self.timeout_s - SILENCE_S - INTERVAL_S:
                self._earlier = self._counts()
            if now - since > self.timeout_s + WATCH_MARGIN_S:
                found = self.diagnose()
                if found and not self._over:
                    self._on_hang(found)
                self._earlier, since = None, time.monotonic()


def _board() -> Board:
    if folder := launch_dir():
        return FolderBoard(folder)
    return StoreBoard(dist.distributed_c10d._get_default_store())


def remember_collectives() -> None:
    """Turns c10d's flight recorder on; must come before the process group exists."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", _RECORDS)


def latest_collectives() -> tuple[str | None, dict[str, Issued]]:
    """The group that issued last, and the latest collective of each group that the flight recorder remembers."""
    found: dict[str, Issued] = {}
    last, newest = None, -1
    for dump in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        read = getattr(torch._C._distributed_c10d, dump, None)
        entries = json.loads(read()).get("entries", []) if read else []
        for entry in entries:
            name, description = entry["process_group"]
            kind = entry["profiling_name"].rpartition(":")[2]
            peer_to_peer = bool(entry["is_p2p"])
            sequence = entry["p2p_seq_id" if peer_to_peer else "collective_seq_id"]
            found[name] = Issued(kind, sequence, _label(name, description), _bytes(entry), peer_to_peer)
            if entry["time_created_ns"] >= newest:
                last, newest = name, entry["time_created_ns"]
    for name, each in list(last_exchanges.items()):
        key = f"{name}, exchanges"  # numbered apart from what gloo itself does in the group
        found[key] = Issued(each.operation, each.sequence, _label(name, each.group), each.bytes)
        if each.time_ns >= newest:
            last, newest = key, each.time_ns
    return last, found


def _label(name: str, description: str) -> str:
    """How messages call a group."""
    label = description.removeprefix("mesh_") if description not in ("", "undefined") else name
    return "all" if label == "default_pg" else label


def _bytes(entry: dict[str, object]) -> int:
    """Bytes of a collective's inputs."""
    total = 0
    sizes, dtypes = entry.get("input_sizes"), entry.get("input_dtypes")
    if isinstance(sizes, list) and isinstance(dtypes, list):
        for shape, dtype in zip(sizes, dtypes, strict=False):
            elements = 1
            for length in shape:
                elements *= length
            total += elements * _BYTES.get(dtype, 1)
    return total


def innermost_line(frame: FrameType | None) -> str:
    """The innermost line of this package in a stack, such as 'parallel/gradients.py:91 in finish'."""
    package = str(Path(__file__).parent.parent)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(package):
            return f"{os.path.relpath(name, package)}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


# Who is to blame


def process_name(rank: int, size: int) -> str:
    """How messages name a process."""
    return f"process {rank + 1} of {size} (rank {rank})"


def hang_message(
    waiting: Beat, beats: Sequence[Beat], before: dict[int, int], size: int, timeout_s: float | None
) -> str | None:
    """Names the processes for which `waiting` waits: those whose count is still that of `before`, else those behind it.

    None if every process beats and has reached the collective: the network, or work that takes longer than the timeout.
    """
    others = [beat for beat in beats if beat.rank != waiting.rank and not beat.left]
    silent = [beat for beat in others if beat.count == before.get(beat.rank)]
    behind = [beat for beat in others if _is_behind(beat, waiting)]
    for blamed, what in ((silent, "does not respond"), (behind, "is behind the others")):
        if blamed:
            names = "; ".join(f"{process_name(beat.rank, size)} {what}{_last_seen(beat)}" for beat in blamed)
            return f"{names}; {_waits(waiting, size, timeout_s)}"
    return None


def _is_behind(beat: Beat, waiting: Beat) -> bool:
    """Whether a process has not issued the collective in which another one waits."""
    mine = waiting.issued.get(waiting.last or "")
    theirs = beat.issued.get(waiting.last or "")
    if mine is None or theirs is None or mine.point_to_point or theirs.point_to_point:
        return False
    return theirs.sequence < mine.sequence


def _last_seen(beat: Beat) -> str:
    last = beat.issued.get(beat.last or "")
    parts = [f"step {beat.step}", f"phase {beat.phase}"]
    parts += [f"at {beat.where}"] if beat.where else []
    parts += [f"last collective {last}"] if last else []
    return f" (last seen in {', '.join(parts)})"


def _waits(waiting: Beat, size: int, timeout_s: float | None) -> str:
    """`timeout_s` None: it did not wait for a timeout."""
    last = waiting.issued.get(waiting.last or "")
    what = f", in {last}" if last else ""
    did = "lost its connection" if timeout_s is None else f"waited {timeout_s:g} s"
    return f"{process_name(waiting.rank, size)} {did} in step {waiting.step}, phase {waiting.phase}{what}"
