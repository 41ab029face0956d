"""Saves of a run, in the foreground or in the background while training continues.

A background save stalls training only while this process's share is copied to host memory. A thread then performs the same steps
as a foreground save, with the same guarantees: it writes, hashes and syncs the files; waits, over a separate process group, until
all processes have done so; and the main process renames the folder. At most one save is in flight. The main thread collects its
result between two steps, once all processes have finished.

This is a thread rather than a process because writing, syncing and hashing release the GIL, and because a process would need the
copy in shared memory.

If the last save of a run fails, the weights are lost, so it is retried and falls back to another folder (`save_with_retries`).
"""

import dataclasses
import datetime
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from boost.config import Config
from boost.errors import BoostError, StorageError
from boost.optim.adamw import Optimizer
from boost.parallel.mesh import Mesh
from boost.train.checkpoint.agreement import root_cause, run_on_all
from boost.train.checkpoint.files import CheckpointState, Position
from boost.train.checkpoint.slices import LocalSlice, SaveShare
from boost.train.checkpoint.write import SavedCheckpoint, Snapshot, write_snapshot
from boost.train.heartbeat import background_save
from boost.train.model import Model

log = logging.getLogger("boost")

FIRST_WAIT_S, LONGEST_WAIT_S = 5.0, 60.0
"""Seconds between attempts of the last save."""


class HostBuffer:
    """Host memory for one copy of this process's slices, reused by all background saves; pinned if the weights are on a GPU."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self._buffer.nbytes

    def reserve(self, slices: list[LocalSlice]) -> None:
        """Allocates and touches the memory, so that allocation and page faults do not slow down saves."""
        total = sum(s.local.nbytes for s in slices)
        if self.nbytes != total:
            pinned = any(s.local.is_cuda for s in slices)
            self._buffer = torch.zeros(total, dtype=torch.uint8, pin_memory=pinned)

    def copy(self, slices: list[LocalSlice]) -> list[LocalSlice]:
        """Returns the slices with their tensors replaced by copies. Waits for the copies to finish."""
        self.reserve(slices)
        copies, begin = [], 0
        for s in slices:
            end = begin + s.local.nbytes
            copy = self._buffer[begin:end].view(s.local.dtype).view(s.local.shape)
            copies.append(dataclasses.replace(s, local=copy.copy_(s.local, non_blocking=True)))
            begin = end
        if any(s.local.is_cuda for s in slices):
            torch.cuda.current_stream().synchronize()
        return copies


class CheckpointSaver:
    """Saves one model and optimizer. All methods except `close` and `in_flight` are collective."""

    expected_errors: tuple[type[Exception], ...] = ()
    """Errors of a background save that are no defect, so that their traceback is not logged."""

    def __init__(
        self, model: Model, optimizer: Optimizer, config: Config, tokenizer: bytes, data: dict[str, Any], mesh: Mesh
    ) -> None:
        """`tokenizer`: content of tokenizer.json for every checkpoint, independent of later changes to the token store."""
        self._model, self._optimizer, self._mesh = model, optimizer, mesh
        self._config, self._tokenizer, self._data = config, tokenizer, data
        self._share: SaveShare | None = None
        self._buffer = HostBuffer()
        self._group: dist.ProcessGroup | None = None
        self._thread: threading.Thread | None = None
        self._step = 0
        self._outcome: SavedCheckpoint | Exception | None = None

    def add_data(self, data: dict[str, Any]) -> None:
        """Adds entries to the `data` that later checkpoints record."""
        self._data = {**self._data, **data}

    @property
    def in_flight(self) -> int | None:
        """Step of the background save that `finish` has not collected yet; None if there is none."""
        return self._step if self._thread else None

    def prepare(self) -> None:
        """Allocates the buffer and the process group in advance, so that the first background save does not stall training."""
        share = self._current_share()
        if self._group is None and self._mesh.size > 1:
            self._group = self._open_group()
        self._buffer.reserve(share.slices())

    def _open_group(self) -> dist.ProcessGroup | None:
        """The process group of background saves."""
        timeout = datetime.timedelta(seconds=self._config.run.save_timeout_s)
        return dist.new_group(backend="gloo", timeout=timeout)

    def _close_group(self, group: dist.ProcessGroup) -> None:
        dist.destroy_process_group(group)

    def _current_share(self) -> SaveShare:
        self._share = self._share or SaveShare(self._model, self._optimizer, self._mesh)
        return self._share

    def save(self, folder: Path, position: Position) -> SavedCheckpoint:
        """Saves in the foreground. Needs no buffer. Raises the same errors as `write_snapshot`."""
        assert self._thread is None, "at most one save is in flight"
        return write_snapshot(folder, self._snapshot(position, None), self._mesh)

    def start(self, folder: Path, position: Position) -> None:
        """Copies weights, optimizer state and RNG states, and writes them in the background."""
        assert self._thread is None, "at most one save is in flight"
        self.prepare()
        snapshot = self._snapshot(position, self._buffer)
        self._step, self._outcome = position.step, None
        facts = folder, snapshot, dataclasses.replace(self._mesh), self._group  # the mesh may change meanwhile
        self._thread = threading.Thread(target=self._write, args=facts, name="save", daemon=True)
        self._thread.start()

    def done_everywhere(self) -> bool:
        """Whether the save in flight has ended on all processes, so that `finish` does not wait."""
        done = self._thread is not None and not self._thread.is_alive()
        if self._mesh.size == 1:
            return done
        all_done = torch.tensor(int(done))
        dist.all_reduce(all_done, dist.ReduceOp.MIN, group=self._mesh.everyone.group)
        return bool(all_done)

    def finish(self) -> SavedCheckpoint:
        """Waits for the save in flight. Raises StorageError or NonFiniteError on every process if it failed on any."""
        assert self._thread is not None, "no save is in flight"
        self._thread.join()
        outcome, self._thread = self._outcome, None

        def raise_surprise() -> None:
            if isinstance(outcome, Exception) and not isinstance(outcome, BoostError):
                raise StorageError(f"checkpoint of step {self._step} not saved: {root_cause(outcome)}") from outcome

        # Save errors are the same on all processes, but a lost connection between the threads may show on one process only.
        try:
            run_on_all(self._mesh, raise_surprise, StorageError)
        except StorageError:
            self._group = None  # an interrupted group is out of sync; the next save creates a new one
            raise
        if isinstance(outcome, Exception):
            raise outcome
        assert outcome is not None
        return outcome

    def close(self, timeout_s: float) -> None:
        """Waits up to `timeout_s` for a save in flight, even after an error: a checkpoint is worth some seconds."""
        if self._thread:
            log.info("waiting for the checkpoint of step %d", self._step)
            self._thread.join(timeout_s)
        if self._group and not (self._thread and self._thread.is_alive()):
            self._close_group(self._group)
        self._group = None

    def _snapshot(self, position: Position, buffer: HostBuffer | None) -> Snapshot:
        """This process's part of a checkpoint of the current step. Without a `buffer`, it refers to the weights themselves and must
        be written before they change."""
        state = CheckpointState(
            step=position.step,
            tokens=position.tokens,
            updates=self._optimizer.updates,
            next_sample=(position.step + position.skipped) * self._config.train.global_batch,
            skipped_steps=position.skipped,
            trouble=position.trouble,
            doubt=position.doubt,
            recent=position.recent,
            processes=self._mesh.size,
            data=self._data,
            config=self._config.model_dump(),
        )
        slices = self._current_share().slices()
        return Snapshot(state, self._tokenizer, buffer.copy(slices) if buffer else slices)

    def _write(self, folder: Path, snapshot: Snapshot, mesh: Mesh, group: dist.ProcessGroup | None) -> None:
        with background_save():
            try:
                outcome: SavedCheckpoint | Exception = write_snapshot(folder, snapshot, mesh, group)
            except BoostError as error:
                outcome = error
            except Exception as error:
                outcome = error
                if self._thread is threading.current_thread() and not isinstance(error, self.expected_errors):
                    log.exception("the checkpoint of step %d was not saved", snapshot.step)
        if self._thread is threading.current_thread():
            self._outcome = outcome


def save_with_retries(
    save: Callable[[Path], SavedCheckpoint],
    folder: Path,
    fallback: Path | None,
    minutes: float,
    urgent: bool,
    warn: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> SavedCheckpoint:
    """Saves to `folder`. If that fails, retries for `minutes` with one warning per attempt, then saves to `fallback`.

    `urgent`: the process may be killed soon, so `fallback` is tried before the retries. The schedule counts waits, not time, so
    that all processes follow it without communication. Raises StorageError if everything failed.
    """
    try:
        return save(folder)
    except StorageError as error:
        last = error
    waits = list(retry_waits(minutes))
    if urgent and fallback and (saved := _save_elsewhere(save, fallback, last, warn)):
        return saved
    for attempt, wait in enumerate(waits, start=1):
        warn(
            f"{last}; free disk space: attempt {attempt} of {len(waits)} in {wait:.0f} s (run.save_retry_minutes = {minutes:g})"
        )
        sleep(wait)
        try:
            return save(folder)
        except StorageError as error:
            last = error
    if not urgent and fallback and (saved := _save_elsewhere(save, fallback, last, warn)):
        return saved
    raise last


def retry_waits(minutes: float) -> Iterator[float]:
    """Seconds before each retry: doubles up to one minute, `minutes` in total."""
    left, wait = 60 * minutes, FIRST_WAIT_S
    while left > 0:
        yield min(wait, left)
        left -= wait
        wait = min(2 * wait, LONGEST_WAIT_S)


def _save_elsewhere(
    save: Callable[[Path], SavedCheckpoint], fallback: Path, reason: StorageError, warn: Callable[[str], None]
) -> SavedCheckpoint | None:
    warn(f"{reason}; saving in '{fallback}' (run.fallback_dir)")
    try:
        return save(fallback)
    except StorageError as error:
        warn(str(error))
        return None
