"""Two runs in one directory: the second is rejected, and a dead owner's lock is taken over."""

import errno
import json
import multiprocessing
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from boost.errors import ConfigError, LostRunError, StorageError
from boost.train import best_effort, run_lock
from boost.train.run_lock import LOCK_FILE, RunLock, require_unlocked
from tests.train.reads import watched


def own_until_told(folder: Path, answers: Connection) -> None:
    with RunLock(folder, beat_s=0.05) as lock:
        answers.send("owner")
        answers.recv()
        try:
            lock.require_not_taken()
            lock.require_held()
            answers.send("still the owner")
        except LostRunError as error:
            answers.send(str(error))


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Any]:
    """A process that holds the lock until it gets a message over its `connection`."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process: Any = context.Process(target=own_until_told, args=(tmp_path, theirs))
    process.start()
    process.connection = ours
    assert ours.poll(300) and ours.recv() == "owner"
    yield process
    process.kill()
    process.join()


def elsewhere(folder: Path) -> None:
    """Makes the lock look as if written on another host."""
    path = folder / LOCK_FILE
    values = json.loads(path.read_text()) if path.exists() else {"token": "t", "pid": 1}
    path.write_text(json.dumps(values | {"host": "another-host"}))


@pytest.mark.slow
def test_the_second_run_is_refused_and_told_who_is_there(owner: Any, tmp_path: Path) -> None:
    for refuse in (lambda: RunLock(tmp_path).__enter__(), lambda: require_unlocked(tmp_path)):
        with pytest.raises(ConfigError, match=f"is in use by process {owner.pid} on .*choose another --run.dir"):
            refuse()


@pytest.mark.slow
def test_the_lock_of_a_killed_process_is_taken_over_at_once(owner: Any, tmp_path: Path) -> None:
    os.kill(owner.pid, signal.SIGKILL)
    owner.join()
    require_unlocked(tmp_path)
    with RunLock(tmp_path, stale_s=1e9):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_an_owner_on_another_host_is_alive_while_it_touches_the_lock(owner: Any, tmp_path: Path) -> None:
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


def test_a_reply_that_a_network_file_system_loses_is_not_another_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An NFS client that gets no reply to `link` sends it again, and reports EEXIST although the first one succeeded."""
    link = os.link

    def twice(*arguments: str) -> None:
        link(*arguments)
        link(*arguments)

    monkeypatch.setattr(run_lock.os, "link", twice)
    with RunLock(tmp_path) as lock:
        lock.require_held()
        with pytest.raises(ConfigError, match="is in use by process"), RunLock(tmp_path):
            pass
    assert os.listdir(tmp_path) == []


def test_an_owner_notices_that_it_has_lost_its_directory(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with RunLock(folder) as lock:
        lock.require_held()
        folder.rename(tmp_path / "moved")
        with pytest.raises(LostRunError, match="has no run.lock any more.*resume with --resume auto and the --run.dir"):
            lock.require_held()
        lock.require_held(may_be_missing=True)
        with RunLock(folder) as second:  # as another run that starts there
            for missing in (False, True):
                with pytest.raises(
                    LostRunError, match=f"now belongs to process {os.getpid()} on .*ends without writing"
                ):
                    lock.require_held(may_be_missing=missing)
            second.require_held()
    assert not list(folder.iterdir()), "the first owner removes nothing"


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"token": 3}', "[" * 100_000, None])
def test_a_lock_that_names_no_owner_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    """It is being written, or garbage; or (None) it cannot be read. Nothing is written next to it, and no step ends."""
    now, said = [100.0], list[str]()
    monkeypatch.setattr(run_lock, "_now", lambda: now[0])
    monkeypatch.setattr(best_effort, "_failing", set())

    def see(call: str, path: str) -> None:
        if content is None and path.endswith(LOCK_FILE):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    with RunLock(tmp_path, beat_s=1e6) as lock:
        lock._beat_s = 5.0
        usual = lock.path.read_text()
        if content is not None:
            lock.path.write_text(content)
        with watched(see):
            with pytest.raises(StorageError, match="cannot be used now: run.lock cannot be read: (it names|Input)"):
                lock.require_held()
            for _ in range(3):
                now[0] += 62
                lock.require_not_taken(said.append)
        assert len(said) == 1 and said[0].startswith("cannot tell whether another run has taken run.dir over: ")
        lock.path.write_text(usual)
        lock.require_held()


def test_an_owner_whose_process_is_hidden_is_not_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc may hide the processes of others, and files may run out."""
    with RunLock(tmp_path) as lock:
        monkeypatch.setattr(run_lock, "Path", lambda _: tmp_path / "hidden")
        for error, alive in ((None, None), (PermissionError(), None), (ProcessLookupError(), False)):
            monkeypatch.setattr(run_lock.os, "kill", Mock(side_effect=error))
            assert run_lock._is_alive(lock._owner) is alive
        monkeypatch.undo()
        assert run_lock._is_alive(lock._owner)


def test_a_look_at_every_step_reads_the_lock_only_after_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(run_lock, "_now", lambda: now[0])
    with RunLock(tmp_path, beat_s=1e6) as lock:
        lock.path.write_text(json.dumps({"token": "another", "pid": 7, "host": "b"}))
        lock._beat_s = 5.0
        lock.require_not_taken()
        now[0] += 62  # this process was stopped, and another host took over
        with pytest.raises(LostRunError, match="now belongs to process 7 on b"):
            lock.require_not_taken()
        lock.path.unlink()
        now[0] += 62
        lock.require_not_taken()  # nobody else writes there; the next save reports it


def test_the_next_main_process_of_a_run_takes_its_lock_over(tmp_path: Path) -> None:
    with RunLock(tmp_path) as first:
        with RunLock(tmp_path, first.token) as second:
            first.require_held()  # the same run, should the first process wake up
            assert json.loads(second.path.read_text()) == second._owner
        with pytest.raises(LostRunError, match="has no run.lock"):
            first.require_held()
        with RunLock(tmp_path):
            for _ in range(2):
                with pytest.raises(LostRunError, match="now belongs to"), RunLock(tmp_path, first.token):
                    pass
    with RunLock(tmp_path, first.token) as again:  # the first process released it when it ended
        again.require_held()
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_an_owner_that_was_stopped_too_long_does_not_write(
    owner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.kill(owner.pid, signal.SIGSTOP)
    monkeypatch.setattr(run_lock.platform, "node", lambda: "a-second-host")
    with RunLock(tmp_path, beat_s=0.05, stale_s=0.3) as second:
        os.kill(owner.pid, signal.SIGCONT)
        owner.connection.send("write")
        assert owner.connection.poll(300)
        assert f"now belongs to process {os.getpid()} on a-second-host" in owner.connection.recv()
        second.require_held()
        owner.join(300)
        second.require_held()
