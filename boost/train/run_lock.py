"""A lock on the run directory. Without it, two runs in one directory would delete each other's checkpoints and mix their metrics.

The lock is a file, created exclusively, that names its owner. The owner touches it every few seconds. flock and fcntl are not used,
because network file systems implement them differently or not at all. A run takes over a dead owner's lock immediately if the
owner ran on this host, and otherwise after STALE_S seconds without a touch. Only changes in the modification time matter,
not its value, so clocks need not be synchronized.
"""

import contextlib
import json
import logging
import os
import platform
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from boost.errors import ConfigError
from boost.paths import read_text
from boost.train.rundir import storage_errors

log = logging.getLogger("boost")

LOCK_FILE = "run.lock"
BEAT_S = 5.0
"""Seconds between two touches by the owner."""
STALE_S = 60.0
"""A lock from another host is stale if it has not been touched for this long."""


class RunLock:
    """The lock on one run directory, as a context manager. Used only on a run's main process."""

    def __init__(self, folder: Path | str, beat_s: float = BEAT_S, stale_s: float = STALE_S) -> None:
        self.path = Path(folder) / LOCK_FILE
        self._beat_s, self._stale_s = beat_s, stale_s
        self._owner = {
            "token": uuid.uuid4().hex,
            "host": platform.node(),
            "pid": os.getpid(),
            "started": _started(os.getpid()),
            "namespace": _namespace(),
        }
        self._over = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="boost-run-lock", daemon=True)

    def __enter__(self) -> "RunLock":
        """Acquires the lock. Raises ConfigError if another run holds it, and StorageError if the folder is not writable.

        Waits up to STALE_S seconds if the owner of an existing lock ran on another host and may be dead.
        """
        with storage_errors(self.path.parent):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            while not self._create():
                self._wait_for_stale()
        self._beats.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._beats.join()
        if _read(self.path).get("token") == self._owner["token"]:
            with contextlib.suppress(OSError):
                self.path.unlink()

    def _create(self) -> bool:
        """Creates the lock atomically, so that readers never see a partial file. Returns False if it exists."""
        draft = self.path.with_name(f".{LOCK_FILE}.{self._owner['token']}")
        draft.write_text(json.dumps(self._owner), encoding="utf-8")
        try:
            os.link(draft, self.path)  # atomic on network file systems too, and fails if the name exists
        except FileExistsError:
            return False
        except OSError:  # a file system without hard links
            try:
                with open(self.path, "x", encoding="utf-8") as file:
                    file.write(json.dumps(self._owner))
            except FileExistsError:
                return False
        finally:
            draft.unlink()
        return True

    def _wait_for_stale(self) -> None:
        """Waits until the lock is gone, or removes it if its owner is dead. Raises ConfigError if the owner is alive."""
        owner, touched = _read(self.path), _touched(self.path)
        begin, logged = time.monotonic(), False
        while (alive := _is_alive(owner)) is None and time.monotonic() - begin < self._stale_s:
            if touched is None or _read(self.path).get("token") != owner.get("token"):
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
        aside = self.path.with_name(f".{LOCK_FILE}.stale.{self._owner['token']}")
        with contextlib.suppress(FileNotFoundError):
            self.path.rename(aside)
            if _read(aside).get("token") != owner.get("token"):  # another process was faster, and this is its lock
                with contextlib.suppress(OSError):
                    os.link(aside, self.path)
            else:
                log.warning("took over the lock of %s from %s, which is gone", self.path.parent, _describe(owner))
            aside.unlink()

    def _beat(self) -> None:
        while not self._over.wait(self._beat_s):
            with contextlib.suppress(OSError):
                if _read(self.path).get("token") == self._owner["token"]:
                    os.utime(self.path)


def require_unlocked(folder: Path | str) -> None:
    """Raises ConfigError if a run on this host holds the lock. Does not wait. Used by commands that start processes."""
    path = Path(folder) / LOCK_FILE
    owner = _read(path)
    if owner and _is_alive(owner):
        raise in_use_error(path.parent, owner)


def is_held(folder: Path | str) -> bool:
    """Whether a run holds the lock. Does not wait. For an owner on another host, compares the modification time with the local
    clock."""
    path = Path(folder) / LOCK_FILE
    owner = _read(path)
    alive = _is_alive(owner) if owner else False
    if alive is None:
        touched = _touched(path)
        return touched is not None and time.time() - touched / 1e9 < STALE_S
    return alive


def in_use_error(folder: Path, owner: dict[str, Any]) -> ConfigError:
    """The error for a run directory that is in use; it names the owner."""
    return ConfigError(
        f"run.dir = '{folder}' is in use by {_describe(owner)}; wait for that run, stop it, or choose another --run.dir"
    )


def _is_alive(owner: dict[str, Any]) -> bool | None:
    """Whether the owner is running; None if that is unknown (another host or container, or no /proc)."""
    here = owner.get("host") == platform.node() and owner.get("namespace") == _namespace() is not None
    pid, started = owner.get("pid"), owner.get("started")
    if not here or not isinstance(pid, int) or started is None:
        return None
    return _started(pid) == started


def _started(pid: int) -> str | None:
    """A process's start time as boot id and clock ticks, because process ids are reused. None if there is no such process."""
    with contextlib.suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        if fields[0] in "ZX":  # dead, and not yet reaped
            return None
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text(encoding='ascii').strip()} {fields[19]}"
    return None


def _namespace() -> str | None:
    """The PID namespace, because containers may share a host name but not process ids."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return None


def _read(path: Path) -> dict[str, Any]:
    """The owner in the lock file; {} if there is no lock or it cannot be read."""
    try:
        values = json.loads(read_text(path))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _touched(path: Path) -> int | None:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime_ns
    return None


def _describe(owner: dict[str, Any]) -> str:
    host, pid = owner.get("host", "an unknown host"), owner.get("pid", "?")
    return f"process {pid} on {host!s:.200}"
