"""Two runs in one directory: the second is rejected, and a dead owner's lock is taken over."""

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from boost.errors import ConfigError
from boost.train import run_lock
from boost.train.run_lock import LOCK_FILE, RunLock, require_unlocked


def hold(folder: Path, ready: "multiprocessing.synchronize.Event") -> None:  # type: ignore[name-defined]
    with RunLock(folder, beat_s=0.05):
        ready.set()
        time.sleep(600)


@pytest.fixture
def owner(tmp_path: Path):  # type: ignore[no-untyped-def]
    """A process that holds the lock."""
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=hold, args=(tmp_path, ready))
    process.start()
    assert ready.wait(300)
    yield process
    if process.is_alive():
        process.kill()
    process.join()


def elsewhere(folder: Path) -> None:
    """Makes the lock look as if written on another host."""
    path = folder / LOCK_FILE
    values = json.loads(path.read_text()) if path.exists() else {"token": "t", "pid": 1}
    path.write_text(json.dumps(values | {"host": "another-host"}))


@pytest.mark.slow
def test_the_second_run_is_refused_and_told_who_is_there(owner, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    for refuse in (lambda: RunLock(tmp_path).__enter__(), lambda: require_unlocked(tmp_path)):
        with pytest.raises(ConfigError, match=f"is in use by process {owner.pid} on .*choose another --run.dir"):
            refuse()


@pytest.mark.slow
def test_the_lock_of_a_killed_process_is_taken_over_at_once(owner, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    os.kill(owner.pid, signal.SIGKILL)
    owner.join()
    require_unlocked(tmp_path)
    with RunLock(tmp_path, stale_s=1e9):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_an_owner_on_another_host_is_alive_while_it_touches_the_lock(owner, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    elsewhere(tmp_path)
    with pytest.raises(ConfigError, match="on another-host"), RunLock(tmp_path, beat_s=0.1, stale_s=1e9):
        pass


def test_a_lock_that_is_damaged_or_of_another_host_is_taken_over_if_nobody_touches_it(tmp_path: Path) -> None:
    elsewhere(tmp_path)
    for _ in range(2):
        with RunLock(tmp_path, beat_s=0.02, stale_s=0.2):
            assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
        assert os.listdir(tmp_path) == []
        (tmp_path / LOCK_FILE).write_bytes(b"\xff\x00")


def test_a_process_number_that_is_used_again_is_not_the_owner(tmp_path: Path) -> None:
    with RunLock(tmp_path) as lock:
        values = json.loads(lock.path.read_text())
    (tmp_path / LOCK_FILE).write_text(json.dumps(values | {"started": "another boot 7"}))
    with RunLock(tmp_path, stale_s=1e9):
        pass


def test_a_lock_that_was_taken_away_is_not_removed(tmp_path: Path) -> None:
    with RunLock(tmp_path) as lock:
        lock.path.write_text(json.dumps({"token": "another"}))
    assert json.loads(lock.path.read_text()) == {"token": "another"}


def test_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("no links")

    monkeypatch.setattr(run_lock.os, "link", refuse)
    with RunLock(tmp_path), pytest.raises(ConfigError, match="in use"), RunLock(tmp_path):
        pass
    assert os.listdir(tmp_path) == []
