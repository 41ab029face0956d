"""Start of a run without a launcher: a process that receives a stop signal tells the others, including those that start later."""

import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from boost.errors import StoppedError
from boost.parallel import rendezvous
from boost.parallel.rendezvous import agree_on_attempt

LIMIT_S = 600.0


def start(rank: int, signal: str | None) -> str:
    store = rendezvous._connect(rank, LIMIT_S, lambda: signal)
    return agree_on_attempt(store, rank, 2, LIMIT_S, lambda: signal)


def test_a_process_stopped_before_rank_0_starts_still_tells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setattr(rendezvous, "_CONNECT_S", 0.5)
    monkeypatch.setattr(rendezvous, "_LATE_S", LIMIT_S)
    with ThreadPoolExecutor(2) as pool:
        told: Future[str] = pool.submit(start, 1, "SIGTERM")
        time.sleep(2)  # several attempts may fail; the outcome is the same either way
        assert not told.done(), "left without a word"
        late = pool.submit(start, 0, None)
        for each in (told, late):
            with pytest.raises(StoppedError, match="SIGTERM"):
                each.result(LIMIT_S)


def test_it_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(probe.getsockname()[1]))
    monkeypatch.setattr(rendezvous, "_CONNECT_S", 0.5)
    monkeypatch.setattr(rendezvous, "_LATE_S", 0.0)
    with pytest.raises(StoppedError, match="SIGTERM"):
        start(1, "SIGTERM")
