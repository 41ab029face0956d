"""Background saves: the same files as foreground saves, one in flight, failures reported between steps."""

import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open

from boost.config import Config
from boost.errors import NonFiniteError, StorageError, TrainingError
from boost.parallel.mesh import Mesh
from boost.train import checkpoint as ckpt
from boost.train.checkpoint import Position, SavedCheckpoint, commit, write
from boost.train.checkpoint.reshard import LocalSlice, assign
from boost.train.checkpoint.write import HostBuffer, Snapshot, write_snapshot
from boost.train.events import SaveEnd, SaveStart, StepEnd
from boost.train.hooks import Hook
from boost.train.loop import Trainer
from tests import toy
from tests.distributed import run_distributed
from tests.train.runs import Do, fitted, make_config, started
from tests.train.saves import DATA, TOKENIZER, load, mesh_config, save_at
from tests.trained import Trained

LIMIT_S = 300.0


def files_of(path: Path) -> dict[str, bytes]:
    return {p.relative_to(path).as_posix(): p.read_bytes() for p in path.rglob("*") if p.is_file()}


class HeldDisk:
    """A disk that blocks saves until it is released."""

    def __init__(self, patch: pytest.MonkeyPatch, fails: bool = False) -> None:
        self.release, self.started, self.fails = threading.Event(), list[int](), fails
        patch.setattr(write, "write_snapshot", self._write)

    def _write(self, folder: Path, snapshot: Snapshot, mesh: Mesh, *rest: Any) -> SavedCheckpoint:
        self.started.append(snapshot.state.step)
        if threading.current_thread() is not threading.main_thread():
            assert self.release.wait(LIMIT_S)
            if self.fails:
                raise StorageError("No space left on device")
        return write_snapshot(folder, snapshot, mesh, *rest)


def save_both_ways(folder: Path, config: Config) -> None:
    """A background save to a disk that blocks until training has changed the weights, and a foreground save; twice, to reuse the
    buffer."""
    trained = Trained(config, 1)
    background = ckpt.CheckpointSaver(trained.model, trained.optimizer, config, TOKENIZER, DATA, trained.mesh)
    for step in (1, 2):
        save_at(folder / "here", trained, step)
        with pytest.MonkeyPatch.context() as patch:
            disk = HeldDisk(patch)
            background.start(folder / "background", Position(step, step * 64))
        assert not background.done_everywhere()
        trained.step(step)
        disk.release.set()
        while not background.done_everywhere():
            trained.mesh.barrier()
        assert background.finish().step == step
    background.close(LIMIT_S)


@pytest.mark.parametrize(
    "parallel",
    [{"tp": 1}, {"tp": 2}, {"dp": 2}, pytest.param({"tp": 2, "dp": 2, "shard": "full"}, marks=pytest.mark.slow)],
    ids=str,
)
def test_a_save_in_the_background_writes_the_same_bytes(tmp_path: Path, parallel: dict[str, Any]) -> None:
    config = mesh_config(**({"tp": 1} | parallel))
    size = config.parallel.world_size
    run_distributed(size, save_both_ways, tmp_path, config) if size > 1 else save_both_ways(tmp_path, config)
    for name in ("step-00000001", "step-00000002"):
        assert files_of(tmp_path / "background" / name) == files_of(tmp_path / "here" / name)
        assert load(tmp_path / "background" / name, toy.single(config))[1].step == int(name[-1])


def test_chunks_are_hashed_as_they_are_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that end within a chunk, fill several, are empty or not contiguous."""
    monkeypatch.setattr(write, "CHUNK_BYTES", 64)
    monkeypatch.setattr(commit, "CHUNK_BYTES", 64)
    tensors = [torch.arange(12.0).view(3, 4).T, torch.randn(0), torch.randn(100), torch.arange(3, dtype=torch.uint8)]
    slices = [LocalSlice(str(i), x, tuple(x.shape), (0,) * x.dim()) for i, x in enumerate(tensors)]
    with (tmp_path / "x").open("wb") as stream:
        entry = write._write_tensors(stream, slices, {})
    assert (
        entry == commit.entry_of(tmp_path / "x") == commit.write_synced(tmp_path / "y", (tmp_path / "x").read_bytes())
    )
    with safe_open(tmp_path / "x", framework="pt") as file:
        assert all(torch.equal(file.get_tensor(str(i)), x) for i, x in enumerate(tensors))
    for position in (0, 50, 99):
        tensors[2][position] = torch.inf
        with (tmp_path / "x").open("wb") as stream, pytest.raises(NonFiniteError, match="2 holds a value"):
            write._write_tensors(stream, slices, {})
        tensors[2][position] = 0.0


@pytest.mark.skipif(sys.platform != "linux", reason="a thread has no priority of its own")
def test_a_background_save_lowers_the_priority_of_its_thread_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, priorities = mesh_config(1), list[int]()
    trained = Trained(config, 1)

    def own_priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def record(*arguments: Any) -> SavedCheckpoint:
        priorities.append(own_priority())
        return write_snapshot(*arguments)

    monkeypatch.setattr(write, "write_snapshot", record)
    before = own_priority()
    saver = ckpt.CheckpointSaver(trained.model, trained.optimizer, config, TOKENIZER, DATA, trained.mesh)
    saver.start(tmp_path, Position(1, 64))
    saver.finish()
    saver.close(LIMIT_S)
    assert own_priority() == before and priorities == [min(before + write.NICENESS, 19)]


class Recorder(Hook):
    """Records events after steps and around saves, in order."""

    def __init__(self, disk: HeldDisk, release_before_save: int | None, release_after_step: int | None = None) -> None:
        self.seen: list[str] = []
        self.disk, self.before_save_of, self.after = disk, release_before_save, release_after_step

    def after_step(self, trainer: Trainer, event: StepEnd) -> None:
        self.seen.append(f"step {event.metrics.step}")
        if event.metrics.step == self.before_save_of:
            # Not yet: the save of this step finds the one before still in flight.
            threading.Timer(0.2, self.disk.release.set).start()
        if event.metrics.step == self.after:
            self.disk.release.set()
            trainer.saves.saver._thread.join(LIMIT_S)  # type: ignore[union-attr]

    def before_save(self, trainer: Trainer, event: SaveStart) -> None:
        self.seen.append(f"save {event.step}")

    def after_save(self, trainer: Trainer, event: SaveEnd) -> None:
        assert ckpt.open_checkpoint(event.path).position.step == event.step
        self.seen.append(f"saved {event.step}")

    def on_warning(self, trainer: Trainer, text: str) -> None:
        self.seen.append(f"warning: {text}")


def test_training_goes_on_and_hears_of_the_checkpoint_between_steps(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(HeldDisk(monkeypatch), None, release_after_step=4)
    fitted(make_config(store, tmp_path, train={"steps": 6, "save_every": 2, "keep": 9, "async_save": True}), recorder)
    seen = [each for each in recorder.seen if "training waited" not in each]  # what a slow disk is told
    assert seen == [
        *["step 1", "step 2", "save 2", "step 3", "step 4", "saved 2", "save 4"],
        *seen[7:-2],
        *["save 6", "saved 6"],
    ]
    assert sorted(seen[7:-2]) == ["saved 4", "step 5", "step 6"], "after step 4, 5 or 6: as the disk has it"


def test_a_save_waits_for_the_one_in_flight(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = HeldDisk(monkeypatch)
    recorder = Recorder(disk, release_before_save=4)
    monkeypatch.setattr("boost.train.loop.SLOW_SAVE_S", 0.0)
    fitted(make_config(store, tmp_path, train={"steps": 5, "save_every": 2, "keep": 9}), recorder)
    first = recorder.seen.index("saved 2")
    assert recorder.seen[:first] == ["step 1", "step 2", "save 2", "step 3", "step 4"]
    assert "for step 2's checkpoint, which was still being written" in recorder.seen[first + 1]
    assert disk.started == [2, 4, 5]


def test_a_failure_in_the_background_is_a_warning_and_the_last_save_is_waited_for(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = HeldDisk(monkeypatch, fails=True)
    disk.release.set()
    recorder = Recorder(disk, None)
    trainer = fitted(make_config(store, tmp_path, train={"steps": 3, "save_every": 1}), recorder)
    said = [seen for seen in recorder.seen if seen.startswith("warning: No space")]
    assert said == ["warning: No space left on device; training continues and earlier checkpoints are intact"] * 2
    assert [p.name for p in ckpt.complete_checkpoints(trainer.run.checkpoints)] == ["step-00000003"]


def test_a_run_that_ends_with_an_error_completes_the_save_in_flight(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = HeldDisk(monkeypatch)

    def fail(_: Trainer) -> None:
        threading.Timer(0.2, disk.release.set).start()
        raise TrainingError("diverged")

    trainer = started(make_config(store, tmp_path, train={"save_every": 2}), Do("after_step", 3, fail))
    with pytest.raises(TrainingError, match="diverged"):
        trainer.fit()
    assert [p.name for p in ckpt.complete_checkpoints(trainer.run.checkpoints)] == ["step-00000002"]


def test_every_slice_has_one_writer_and_writers_share_the_work() -> None:
    shared = {("a", (0,)): 60, ("b", (0,)): 50, ("c", (0,)): 40}
    by_rank = [shared | {("own", (0,)): 10}, shared, shared]
    assigned = assign(by_rank)
    assert sorted(key for keys in assigned for key in keys) == sorted(by_rank[0])
    assert all(assigned) and ("own", (0,)) in assigned[0]


def test_host_memory_of_gpus_is_pinned_to_the_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's allocator of pinned memory rounds up to a power of two."""
    pinned: dict[int, int] = {}
    cuda = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: pinned.update({address: size}) or 0, cudaHostUnregister=pinned.pop
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)

    def on_gpu(size: int) -> Any:
        return SimpleNamespace(local=SimpleNamespace(nbytes=size, is_cuda=True))

    buffer = HostBuffer()
    for sizes in ((1_000_000, 100_001), (7,)):
        buffer.reserve([on_gpu(size) for size in sizes])
        assert list(pinned.values()) == [sum(sizes)] and buffer._buffer.nbytes == sum(sizes)
        assert buffer._buffer.untyped_storage().nbytes() == sum(sizes) and not buffer._buffer.any()
    del buffer
    assert not pinned
