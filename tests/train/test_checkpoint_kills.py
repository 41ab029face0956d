"""A process killed at any file-system event of a foreground or background save loses at most that save."""

import functools
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from boost.config import Config
from boost.errors import StorageError
from boost.train import checkpoint as ckpt
from boost.train.agreement import run_on_main
from boost.train.checkpoint import Position, write
from tests.distributed import fork_server
from tests.train.saves import DATA, TOKENIZER, load, mesh_config, save_at, state_of
from tests.trained import Trained

LIMIT_S = 300.0
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir")
EVERY_CHUNK = 20
"""Toy tensors are small, so that chunks would be most of the events: one in so many counts."""


class Events:
    """Counts file-system changes of this process, and kills it just before a given one."""

    def __init__(self, folder: Path, kill_at: int | None) -> None:
        self.folder, self.kill_at, self.count, self.chunks = str(folder), kill_at, 0, 0
        sys.addaudithook(self._audit)
        os.fsync = self._counting(os.fsync)
        write._finite = self._counting_chunks(write._finite)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        opened = event == "open" and str(arguments[0]).startswith(self.folder)
        if opened or event in CHANGES:
            self._happen()

    def _happen(self) -> None:
        if self.count == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1

    def _counting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: (self._happen(), call(*arguments))[1]

    def _counting_chunks(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            self.chunks += 1
            if self.chunks % EVERY_CHUNK == 0:
                self._happen()
            return call(*arguments)

        return counted


def save_and_rotate(
    folder: Path, config: Config, background: bool, kill: tuple[int, int] | None, rank: int, answer: Connection
) -> None:
    """Saves step 1, then step 2 with events counted, then removes step 1. `kill`: (rank, event)."""
    torch.set_num_threads(1)
    if (size := config.parallel.world_size) > 1:
        store = f"file://{folder}.store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    trained = Trained(config, 1)
    save_at(folder, trained, 1)
    trained.step(1)
    saver = ckpt.CheckpointSaver(trained.model, trained.optimizer, config, TOKENIZER, DATA, trained.mesh)
    saver.prepare()
    events = Events(folder, kill[1] if kill and kill[0] == rank else None)
    try:
        if background:
            saver.start(folder, Position(2, 128))
            if size == 1:
                trained.step(2)  # training goes on and changes the weights
            saver.finish()
        else:
            saver.save(folder, Position(2, 128))
        run_on_main(trained.mesh, lambda: ckpt.rotate(folder, 1, 0, ()), StorageError)
    except (RuntimeError, StorageError):
        if not kill or kill[0] == rank:
            raise
    answer.send(events.count)


def run_processes(folder: Path, config: Config, background: bool, kill: tuple[int, int] | None) -> list[int | None]:
    """The number of events by rank; None for a process that was killed."""
    context = fork_server()
    started = []
    for rank in range(config.parallel.world_size):
        ours, theirs = context.Pipe()
        arguments = (folder, config, background, kill, rank, theirs)
        process = context.Process(target=save_and_rotate, args=arguments, daemon=True)
        process.start()
        theirs.close()
        started.append((process, ours))
    counts: list[int | None] = []
    for process, ours in started:
        try:
            counts.append(ours.recv() if ours.poll(LIMIT_S) else pytest.fail("the save hangs"))
        except EOFError:
            counts.append(None)
        process.join(LIMIT_S)
        assert process.exitcode == (0 if counts[-1] is not None else -signal.SIGKILL)
    return counts


@functools.cache
def trained(step: int) -> Trained:
    return Trained(mesh_config(1), step)


def check_killed_save(folder: Path, config: Config, background: bool, rank: int, event: int) -> int:
    """The step that the run resumes from, on one process."""
    counts = run_processes(folder, config, background, (rank, event))
    assert [each is None for each in counts] == [each == rank for each in range(len(counts))]
    newest = ckpt.complete_checkpoints(folder)[-1]
    resumed, position = load(newest, mesh_config(1))
    state = state_of(resumed)
    assert newest.name == f"step-{position.step:08d}" and position.step in (1, 2)
    for name, value in state_of(trained(position.step)).items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=0 if len(counts) == 1 else 1e-12)
    save_at(folder, trained(3), 3)
    ckpt.rotate(folder, 1, 0, ())
    assert [path.name for path in folder.iterdir()] == ["step-00000003"], "nothing is left of the killed save"
    return position.step


def points(total: int, some: int | None) -> list[int]:
    return list(range(total)) if some is None else sorted({total * i // some for i in range(some)} | {total - 1})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "rank", "background", "some"),
    [
        *((1, 0, True, 4), (1, 0, False, 2), (2, 0, True, 2), (2, 1, True, 1)),
        *(
            pytest.param(*each, None, marks=pytest.mark.nightly)
            for each in ((1, 0, True), (1, 0, False), (2, 0, True), (2, 1, True))
        ),
    ],
)
def test_a_kill_at_any_event_of_a_save_costs_at_most_that_save(
    tmp_path: Path, processes: int, rank: int, background: bool, some: int | None
) -> None:
    config = mesh_config(processes)
    total = run_processes(tmp_path / "whole", config, background, None)[rank]
    # mkdir, open, fsync, rename and remove; only the main process makes and renames folders.
    assert total is not None and total > (20 if rank == 0 else 1)
    found = [check_killed_save(tmp_path / str(at), config, background, rank, at) for at in points(total, some)]
    assert found == sorted(found), "before the rename the old one, after it the new one"
    assert set(found) == ({1, 2} if rank == 0 else {1}), "all shards, or no checkpoint"
