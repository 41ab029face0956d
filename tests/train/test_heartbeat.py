"""Heartbeats: which process is blamed when a collective hangs, and what the user sees."""

import errno
import json
import os
import re
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from boost.config.schema import RunConfig
from boost.parallel.collectives import all_reduce
from boost.parallel.mesh import Axis, Mesh
from boost.train import heartbeat
from boost.train.failures import read_reports
from boost.train.graphs import CapturedPasses
from boost.train.heartbeat import (
    Beat,
    FolderBoard,
    Heartbeat,
    Issued,
    Phase,
    StoreBoard,
    hang_message,
    in_phase,
    latest_collectives,
    read_beats,
)
from boost.train.rendezvous import LAUNCH_DIR
from tests import toy
from tests.distributed import run_distributed
from tests.recorded import recorded_graphs
from tests.train.reads import watched


def beat(rank: int, count: int, sequence: int, group: str = "2", **values: Any) -> Beat:
    issued = {group: Issued("all_reduce", sequence, "tp", 4096)}
    return Beat(rank, count, Phase.STEP, 12, "parallel/gradients.py:91 in finish", last=group, issued=issued, **values)


def test_a_process_that_does_not_beat_is_named() -> None:
    beats = [beat(0, 9, 346), beat(1, 5, 345)]
    message = hang_message(beats[0], beats, {0: 5, 1: 5}, 2, 10)
    assert message == (
        "process 2 of 2 (rank 1) is not responding (last seen in step 12, phase step, at parallel/gradients.py:91 in finish, "
        "last collective all_reduce #345 of group 'tp' (4096 bytes)); process 1 of 2 (rank 0) waited 10 s in step 12, phase step, "
        "in all_reduce #346 of group 'tp' (4096 bytes)"
    )
    # A connection that was lost was not waited for.
    message = hang_message(beats[0], beats, {0: 5, 1: 5}, 2, None)
    assert message is not None and "process 1 of 2 (rank 0) lost its connection in step 12" in message


def test_a_process_that_beats_but_is_behind_in_the_same_group_is_named() -> None:
    waiting, behind, level, elsewhere = beat(0, 9, 346), beat(1, 9, 345), beat(2, 9, 346), beat(3, 9, 7, group="3")
    before = dict.fromkeys(range(4), 5)
    message = hang_message(waiting, [waiting, behind, level, elsewhere], before, 4, 10)
    assert message is not None
    assert message.startswith("process 2 of 4 (rank 1) is behind the other processes")
    assert "rank 2" not in message and "rank 3" not in message
    # Silence explains more than being behind.
    silent = hang_message(waiting, [waiting, behind, beat(2, 5, 346)], before, 4, 10)
    assert silent is not None and silent.startswith("process 3 of 4 (rank 2) is not responding")


def test_nobody_is_blamed_while_all_beat_alike_or_for_having_left() -> None:
    waiting = beat(0, 9, 346)
    assert hang_message(waiting, [waiting, beat(1, 9, 346)], {1: 5}, 2, 10) is None
    assert hang_message(waiting, [waiting, beat(1, 5, 345, left=True)], {1: 5}, 2, 10) is None


def test_nobody_is_blamed_if_all_were_suspended() -> None:
    waiting, behind = beat(0, 9, 346, stopped_s=40.0), beat(1, 9, 345, stopped_s=30.4)
    message = hang_message(waiting, [waiting, behind], {0: 5, 1: 5}, 2, 10)
    assert message is not None and message.startswith("all 2 processes were stopped for about 30 s"), message
    assert "rank 1" not in message
    left = beat(1, 5, 345, stopped_s=30.4, left=True)
    assert "all 2 processes were stopped" in str(hang_message(waiting, [waiting, left], {0: 5, 1: 5}, 2, None))
    for blamed in (beat(1, 9, 345), beat(1, 5, 345, stopped_s=30.4)):  # was not suspended; does not respond since
        assert str(hang_message(waiting, [waiting, blamed], {0: 5, 1: 5}, 2, 10)).startswith(
            "process 2 of 2 (rank 1) is "
        )


def test_a_process_that_was_suspended_says_so_and_reads_the_heartbeats_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, seconds = [100.0], [1.0, 40.0, 1.0, 1.0, heartbeat.RESUMED_S, 1.0]
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(heartbeat.time, "sleep", lambda seconds: clock.append(clock.pop() + seconds))
    run = RunConfig.model_validate({"startup_timeout_s": 1000})
    beating, said = Heartbeat(Mesh(toy.CPU, rank=0, size=2), run, print), list[float]()
    beating._board = mock.Mock(post=lambda rank, text: said.append(json.loads(text)["stopped_s"]))

    def sleep(_: float) -> None:
        clock[0] += seconds.pop(0)
        beating._over = not seconds

    monkeypatch.setattr(beating.wake, "wait", sleep)
    beating._run()
    assert said == [0, 40, 40, 40, 30, 30]
    other = iter([beat(1, 7, 345), beat(1, 8, 345)])
    beating._board = mock.Mock(read=lambda _: [next(other)])
    beating._earlier = clock[0], {1: 7}
    clock[0] += 40
    assert beating.diagnose() is None, "its count has not changed since before the suspension, and grows since"


def recorded(folder: str) -> tuple[Any, ...]:
    """What a process publishes around collectives, in phases with different timeouts."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    world = torch.distributed.group.WORLD
    os.environ[LAUNCH_DIR] = folder
    run = RunConfig.model_validate({"timeout_s": 11, "save_timeout_s": 22})
    try:
        with Heartbeat(Mesh(toy.CPU, rank=rank, size=size), run, on_hang=print):
            heartbeat.enter(Phase.STEP, 3)
            all_reduce(torch.ones(5), Axis(rank, size, world))
            step = world._get_backend(toy.CPU).options._timeout.total_seconds()
            with in_phase(Phase.SAVE):
                save = world._get_backend(toy.CPU).options._timeout.total_seconds()
                deadline = time.monotonic() + 600
                while not (mine := [b for b in read_beats(Path(folder)) if b.rank == rank and b.phase == Phase.SAVE]):
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
                torch.distributed.barrier()
        torch.distributed.barrier()
        return step, save, mine[0].phase, mine[0].step, [one.left for one in read_beats(Path(folder))]
    finally:
        del os.environ[LAUNCH_DIR]


def test_phases_have_timeouts_and_are_published(tmp_path: Path) -> None:
    for result in run_distributed(2, recorded, str(tmp_path)):
        assert result == (11, 22, "save", 3, [True, True])


def test_the_line_is_the_innermost_one_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert heartbeat.innermost_line(sys._getframe()) == "", "a test is not part of it"

    class Slow:
        def read(self, size: int) -> list[Beat]:
            seen.append(heartbeat.innermost_line(sys._getframe()))
            return []

        def post(self, rank: int, text: str) -> None: ...

    seen: list[str] = []
    beating = Heartbeat(Mesh(toy.CPU, rank=0, size=2), RunConfig(), print)
    beating._board = Slow()
    monkeypatch.setattr(heartbeat, "SILENCE_S", 0.0)
    beating.diagnose()
    assert re.fullmatch(r"train/heartbeat\.py:\d+ in read", seen[0])


def test_a_store_that_was_silent_before_the_timeout_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread first checks before the timeout; the later diagnosis must not mistake that result for a missing store."""
    monkeypatch.setattr(heartbeat, "SILENCE_S", 0.01)
    monkeypatch.delenv(LAUNCH_DIR, raising=False)
    beating = Heartbeat(Mesh(toy.CPU, rank=1, size=2), RunConfig(), print)
    assert beating.diagnose() is None, "it has not begun"
    beating._board = mock.Mock(**{"read.side_effect": RuntimeError("the host of the store is stopped")})
    assert beating._counts() is None
    assert str(beating.diagnose()).startswith("process 1 of 2 (rank 0), which hosts the run's store, is not responding")


def test_a_folder_that_cannot_be_read_blames_nobody_and_ends_no_heartbeat(tmp_path: Path) -> None:
    """A process that stopped sending them would be blamed by the others."""
    beating = Heartbeat(Mesh(toy.CPU, rank=1, size=2), RunConfig(), print)
    beating._board = FolderBoard(tmp_path)
    beating._post()

    def see(call: str, path: str) -> None:
        if path.startswith(str(tmp_path)) and call != "write":
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)

    with watched(see):
        assert beating._read() == read_reports(tmp_path) == []
    beating._post()
    assert [beat.count for beat in read_beats(tmp_path)] == [2]


@pytest.mark.parametrize("text", ["7", "[]", "{}", '{"issued": 1}', '{"rank": 0, "issued": {}}', "[" * 100000, "\x00"])
def test_what_others_write_to_the_store_is_no_heartbeat(text: str) -> None:
    board = StoreBoard(torch.distributed.HashStore())
    board.post(0, text)
    board.post(1, json.dumps(asdict(beat(1, 3, 5))))
    assert board.read(2) == [beat(1, 3, 5)]


def test_the_recorder_is_not_read_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_fr_trace_json", lambda: read.append("{}") or "{}")
    with recorded_graphs(warm_up=0):
        latest_collectives()
        passes = CapturedPasses(lambda *_: torch.zeros(len(latest_collectives()[1])), [], toy.CPU)
        passes([], 1)
        passes([], 1)
    last, issued = latest_collectives()
    assert read == ["{}"] * 2 and last is not None
    assert str(issued[last]) == "CUDA graph #2 of group 'all'", "by which a process that is a replay behind is found"


def records() -> str:
    torch.distributed.barrier()
    last, issued = latest_collectives()
    assert last is not None
    return str(issued[last])


def test_the_latest_collective_is_known_with_its_number_which_is_that_of_all_processes() -> None:
    said = run_distributed(2, records)
    assert said[0] == said[1]
    assert re.fullmatch(r"barrier #\d+ of group 'all'", said[0])


@pytest.mark.slow
def test_a_stopped_process_that_continues_blames_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that is suspended as a whole and later resumed finds all counts unchanged, including its own."""
    monkeypatch.setattr(heartbeat, "SILENCE_S", 0.3)
    monkeypatch.setattr(heartbeat, "INTERVAL_S", 0.01)
    monkeypatch.setattr(heartbeat, "WATCH_MARGIN_S", 0.0)
    monkeypatch.setenv(LAUNCH_DIR, str(tmp_path))
    blamed: list[str] = []
    run = RunConfig.model_validate({"startup_timeout_s": 1})
    beating = Heartbeat(Mesh(toy.CPU, rank=0, size=2), run, blamed.append)
    post = beating._post

    def post_late(left: bool = False) -> Beat:
        if not left:
            time.sleep(0.4)  # each time as if stopped in between
        return post(left)

    monkeypatch.setattr(beating, "_post", post_late)
    (tmp_path / "beat1").write_text('{"rank": 1, "count": 1, "issued": {}}')
    with beating:
        time.sleep(2.5)
    assert blamed == []
    with Heartbeat(Mesh(toy.CPU, rank=0, size=2), run, blamed.append):
        deadline = time.monotonic() + 600
        while not blamed and time.monotonic() < deadline:
            time.sleep(0.05)
    assert blamed[0].startswith("process 2 of 2 (rank 1) is not responding (last seen in step 0, phase start-up")
