"""A lock on the run directory. Without it, two runs in one directory would delete each other's checkpoints and mix their metrics.

The lock is a file, created exclusively, that names its owner. The owner touches it every few seconds. flock and fcntl are not used,
because network file systems implement them differently or not at all. A run takes over a dead owner's lock immediately if the
owner ran on this host, and otherwise after STALE_S seconds without a touch. Only changes in the modification time matter,
not its value, so clocks need not be synchronized.

A run may lose its lock: it was stopped or its machine suspended for longer than STALE_S, or its directory was deleted, renamed or
replaced. The owner therefore reads the lock again before it publishes, renames or removes anything (`require_held`).

Another owner in the lock, or no lock, ends the run. A lock that cannot be read (EIO, ESTALE, garbage) is no evidence of either:
training goes on, and only writing in the directory waits until the lock can be read again. (Inode numbers are no evidence
either: some network and FUSE file systems change them.)
"""

import contextlib
import json
import logging
import os
import platform
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from boost.errors import ConfigError, LostRunError, StorageError
from boost.files import storage_errors
from boost.paths import read_record, read_text, status
from boost.text import JsonObject
from boost.train.best_effort import best_effort

log = logging.getLogger("boost")

LOCK_FILE = "run.lock"
BEAT_S = 5.0
"""Seconds between two touches by the owner."""
_ASIDE_S = 0.2
"""For how long, in seconds, another process that examines the lock may have renamed it."""
STALE_S = 60.0
"""A lock from another host is stale if it has not been touched for this long."""


class RunLock:
    """The lock on one run directory, as a context manager. Used only on a run's main process."""

    def __init__(
        self, folder: Path | str, token: str | None = None, beat_s: float = BEAT_S, stale_s: float = STALE_S
    ) -> None:
        """`token`: the token of the lock that this run's previous main process held, to take it over; None: a new lock."""
        self.path = Path(folder) / LOCK_FILE
        self._beat_s, self._stale_s = beat_s, stale_s
        self._takes_over = token is not None
        self._owner = {
            "token": token or uuid.uuid4().hex,
            "host": platform.node(),
            "pid": os.getpid(),
            "started": _started(os.getpid()),
            "namespace": _namespace(),
        }
        self._looked_at = _now()
        """When this process last saw that it holds the lock, or tried to at a step."""
        self._over = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="boost-run-lock", daemon=True)

    def __enter__(self) -> "RunLock":
        """Acquires the lock. Raises ConfigError if another run holds it, StorageError if the folder is not writable, and
        LostRunError if a lock to take over belongs to another run.

        Waits up to STALE_S seconds if the owner of an existing lock ran on another host and may be dead.
        """
        with storage_errors(self.path.parent):
            if not self._takes_over:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            while not self._create():
                self._wait_for_stale()
        self._looked_at = _now()
        self._beats.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._beats.join()
        with contextlib.suppress(OSError):
            if read_record(self.path) == self._owner:
                self.path.unlink()

    @property
    def token(self) -> str:
        """Identifies the run that holds the lock."""
        return str(self._owner["token"])

    def require_held(self, may_be_missing: bool = False) -> None:
        """Raises LostRunError if another run holds the lock or, unless it `may_be_missing`, nobody does; StorageError if the system
        cannot tell."""
        folder = self.path.parent
        try:
            if status(self.path) is None:
                time.sleep(_ASIDE_S)
            owner = json.loads(read_text(self.path))
            if not (isinstance(owner, dict) and isinstance(owner.get("token"), str)):
                raise ValueError
        except (FileNotFoundError, NotADirectoryError):
            if may_be_missing:
                return
            raise LostRunError(
                f"run.dir = '{folder}' has no {LOCK_FILE} any more: it was deleted, renamed or replaced while this run used it; "
                "this run ends without writing to it; resume with --resume auto and the --run.dir that holds its checkpoints"
            ) from None
        except (OSError, ValueError, RecursionError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it names no owner"
            raise StorageError(
                f"run.dir = '{folder}' cannot be used now: {LOCK_FILE} cannot be read: {reason}"
            ) from error
        if owner["token"] != self._owner["token"]:
            raise LostRunError(
                f"run.dir = '{folder}' now belongs to {_describe(owner)}, because this process was stopped for too long or the "
                "directory was replaced; this run ends without writing to it"
            )
        self._looked_at = _now()

    def require_not_taken(self, warn: Callable[[str], None] = log.warning) -> None:
        """Raises LostRunError if another run holds the lock; only warns if the system cannot tell. Reads it only if the last look
        is too long ago, so it may be called at every step."""
        if _now() - self._looked_at > 2 * self._beat_s:
            self._looked_at = _now()
            with best_effort("tell whether another run has taken run.dir over", warn, StorageError):
                self.require_held(may_be_missing=True)

    def _create(self) -> bool:
        """Creates the lock atomically, so that readers never see a partial file. Returns False if another run's lock exists."""
        draft = self.path.with_name(f".{LOCK_FILE}.{uuid.uuid4().hex}")
        draft.write_text(json.dumps(self._owner), encoding="utf-8")
        try:
            if self._takes_over and read_record(self.path).get("token") == self.token:
                draft.replace(self.path)
                return True
            os.link(draft, self.path)  # atomic on network file systems too, and fails if the name exists
        except FileExistsError:
            # The name may exist because of this call: an NFS client that gets no reply sends the request again.
            return read_record(self.path) == self._owner
        except OSError:  # a file system without hard links
            try:
                with open(self.path, "x", encoding="utf-8") as file:
                    file.write(json.dumps(self._owner))
            except FileExistsError:
                return read_record(self.path) == self._owner
        finally:
            draft.unlink(missing_ok=True)
        return True

    def _wait_for_stale(self) -> None:
        """Waits until the lock is gone, or removes it if its owner is dead. Raises ConfigError if the owner is alive."""
        if self._takes_over:
            self.require_held()
        owner, touched = read_record(self.path), _touched(self.path)
        begin, logged = time.monotonic(), False
        while (alive := _is_alive(owner)) is None and time.monotonic() - begin < self._stale_s:
            if touched is None or read_record(self.path).get("token") != owner.get("token"):
                return
            if _touched(self.path) != touched:
                alive = True
                break
            if not logged and time.monotonic() - begin > 2 * self._beat_s:
                log.warning("waiting for the lock of %s, held by %s", self.path.parent, _describe(owner))
                logged = True
            time.sleep(min(self._beat_s, self._stale_s) / 10)
        if alive:
            raise in_use_error(self.path.parent, owner)
        # If several processes try this, one renames the lock, and the others find a new lock or none.
        aside = self.path.with_name(f".{LOCK_FILE}.stale.{self.token}")
        with contextlib.suppress(FileNotFoundError):
            self.path.rename(aside)
            if read_record(aside).get("token") != owner.get("token"):  # another was faster, and this is its lock
                with contextlib.suppress(OSError):
                    os.link(aside, self.path)
            else:
                log.warning("took over the lock of %s from %s, which is gone", self.path.parent, _describe(owner))
            aside.unlink()

    def _beat(self) -> None:
        while not self._over.wait(self._beat_s):
            with contextlib.suppress(OSError, LostRunError, StorageError):
                self.require_held()
                os.utime(self.path)


def require_unlocked(folder: Path | str) -> None:
    """Raises ConfigError if a run on this host holds the lock. Does not wait. Used by commands that start processes."""
    path = Path(folder) / LOCK_FILE
    owner = read_record(path)
    if owner and _is_alive(owner):
        raise in_use_error(path.parent, owner)


def in_use_error(folder: Path, owner: JsonObject) -> ConfigError:
    """The error for a run directory that is in use; it names the owner."""
    return ConfigError(
        f"run.dir = '{folder}' is in use by {_describe(owner)}; wait for that run, stop it, or choose another --run.dir"
    )


def _is_alive(owner: JsonObject) -> bool | None:
    """Whether the owner is running; None if that is unknown (another host or container, or no /proc that shows it)."""
    here = owner.get("host") == platform.node() and owner.get("namespace") == _namespace() is not None
    pid, started = owner.get("pid"), owner.get("started")
    if not here or not isinstance(pid, int) or started is None:
        return None
    now = _started(pid)
    return None if now is None else now == started


def _now() -> float:
    """Seconds on a clock that also runs while the machine is suspended."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _started(pid: int) -> str | None:
    """A process's start time as boot id and clock ticks, because process ids are reused; '' if it has ended. None if that is
    unknown: without /proc, or if it hides the processes of others or cannot be read."""
    with contextlib.suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        if fields[0] in "ZX":  # dead, and not yet reaped
            return ""
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text(encoding='ascii').strip()} {fields[19]}"
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return ""
    except PermissionError:
        pass
    return None


def _namespace() -> str | None:
    """The PID namespace, because containers may share a host name but not process ids."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return None


def _touched(path: Path) -> int | None:
    about = status(path)
    return about and about.st_mtime_ns


def _describe(owner: JsonObject) -> str:
    host, pid = owner.get("host", "an unknown host"), owner.get("pid", "?")
    return f"process {pid} on {host!s:.200}"
