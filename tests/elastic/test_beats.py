"""Tests which replicas are taken for lost, with a clock that is set."""

import pytest

from boost.elastic.beats import MemberBeats
from boost.elastic.membership import DEAD, SILENT, Member
from boost.train.heartbeat import Beat


class Board:
    def __init__(self, *beats: Beat) -> None:
        self.beats = list(beats)

    def post(self, rank: int, text: str) -> None: ...

    def read(self, size: int) -> list[Beat]:
        return list(self.beats)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [100.0]
    monkeypatch.setattr("boost.elastic.beats.time.monotonic", lambda: clock[0])
    return clock


def test_a_silent_replica_is_told_from_a_restarted_one(clock: list[float]) -> None:
    board = Board(Beat(0, 1, incarnation="0.0"), Beat(1, 1, incarnation="0.0"))
    beats = MemberBeats(board, 2, 2, timeout_s=10)

    def status_after(seconds: float) -> str:
        while seconds > 0:
            clock[0] += min(seconds, 1.0)
            seconds -= 1.0
            found = beats.status(Member(0, "0.0"))
        return found

    assert status_after(9) == ""
    board.beats[0] = Beat(0, 2, incarnation="0.0")
    assert status_after(5) == SILENT, "one of its processes sends nothing"
    board.beats[1] = Beat(1, 2, incarnation="0.0")
    assert status_after(1) == ""
    board.beats[0] = Beat(0, 1, incarnation="0.1")
    assert status_after(1) == DEAD


def test_what_was_not_seen_while_the_store_stalled_is_not_silence(clock: list[float]) -> None:
    board = Board(Beat(0, 1, incarnation="0.0"), Beat(1, 1, incarnation="1.0"))
    beats, read = MemberBeats(board, 2, 1, timeout_s=10), board.read

    def stalls(size: int) -> list[Beat]:
        clock[0] += 20
        return read(size)

    assert beats.status(Member(1, "1.0")) == ""
    clock[0] += 1
    board.read = stalls  # type: ignore[method-assign]
    assert beats.status(Member(1, "1.0")) == ""
    board.read = read  # type: ignore[method-assign]
    for _ in range(11):
        clock[0] += 1
        found = beats.status(Member(1, "1.0"))
    assert found == SILENT


def test_a_replica_that_has_just_started_is_not_taken_for_its_predecessor(clock: list[float]) -> None:
    board = Board(Beat(0, 7, incarnation="0.0"))
    beats = MemberBeats(board, 1, 1, timeout_s=10)
    assert beats.status(Member(0, "0.0")) == ""
    board.beats[0] = Beat(0, 1, incarnation="0.1")
    assert beats.status(Member(0, "0.1")) == "", "no time has passed since the board was read"
    assert beats.status(Member(0, "0.0")) == DEAD
