"""Faults of storage and users: undeletable leftovers, full disks, missing manifests, stray files, non-finite weights."""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from boost.errors import DamagedCheckpointError, NonFiniteError, StorageError
from boost.parallel.mesh import Mesh
from boost.train import checkpoint as ckpt
from boost.train.checkpoint import Position, SavedCheckpoint
from boost.train.loop import Trainer
from boost.train.resume import resume_candidates
from boost.train.samples import heldout_prompt
from boost.train.saves import retry_waits
from tests import toy
from tests.distributed import run_distributed
from tests.train.runs import Do, Warnings, fitted, make_config, make_trainer, small_disk, started
from tests.train.saves import load, mesh_config, save, save_at
from tests.trained import Trained

ALONE = Mesh(toy.CPU)


@pytest.fixture
def undeletable(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a file that cannot be deleted, such as NFS's .nfs* of an open file, even for root."""
    name, unlink = ".nfs0001", os.unlink

    def refuse(path: Any, *rest: Any, **options: Any) -> None:
        if Path(path).name == name:
            raise OSError(errno.EBUSY, "Device or resource busy", str(path))
        unlink(path, *rest, **options)

    monkeypatch.setattr(os, "unlink", refuse)
    yield name
    monkeypatch.undo()


@pytest.mark.parametrize("leftover", [".step-00000003.tmp", ".step-00000003.old", ".step-00000009.abc.tmp"])
def test_a_leftover_that_cannot_be_deleted_costs_no_save(tmp_path: Path, undeletable: str, leftover: str) -> None:
    (tmp_path / leftover / "tensors").mkdir(parents=True)
    (tmp_path / leftover / "tensors" / undeletable).touch()
    (tmp_path / leftover / "other").touch()
    trained = Trained(mesh_config(1), 3)
    saver = ckpt.CheckpointSaver(trained.model, trained.optimizer, trained.config, b"{}", {}, trained.mesh)
    for _ in range(2):  # the second one replaces the first
        saved = saver.save(tmp_path, Position(3, 192))
        assert len(saved.warnings) == 1 and leftover in saved.warnings[0] and undeletable in saved.warnings[0]
    assert load(saved.path, mesh_config(1))[1].step == 3
    assert not (tmp_path / leftover / "other").exists(), "what can be deleted is"


def test_rotation_goes_on_over_what_cannot_be_deleted(tmp_path: Path, undeletable: str) -> None:
    for step in (1, 2, 3):
        _, path = save(tmp_path, mesh_config(1), step)
        (path / undeletable).touch()
    ckpt.rotate(tmp_path, 2, 0, ())
    assert [p.name for p in ckpt.complete_checkpoints(tmp_path)] == ["step-00000002", "step-00000003"]
    ckpt.supersede(tmp_path, 2)
    assert ckpt.find_checkpoint(tmp_path).name == "step-00000002"
    save(tmp_path, mesh_config(1), 3)
    ckpt.supersede(tmp_path, 2)  # a second one of the same name
    aside = sorted(tmp_path.glob("superseded-*"))
    assert [path.name for path in aside] == ["superseded-step-00000003", "superseded-step-00000003.2"]
    assert all((path / "manifest.json").is_file() for path in aside), "nothing is lost"


def test_a_run_keeps_the_tokenizer_that_it_started_with(store: Path, tmp_path: Path) -> None:
    """Its store is replaced after the first step and deleted after the third; all saves succeed and are correct."""
    ours = tmp_path / "store"
    shutil.copytree(store, ours)
    tokenizer = (ours / "tokenizer.json").read_bytes()
    replace = Do("after_step", 1, lambda _: (ours / "tokenizer.json").write_text("{}"))
    delete = Do("after_step", 3, lambda _: shutil.rmtree(ours))
    config = make_config(ours, tmp_path / "run", train={"save_every": 2, "keep": 3, "async_save": False})
    warnings = Warnings()
    trainer = fitted(config, replace, delete, warnings)
    saved = ckpt.complete_checkpoints(trainer.run.checkpoints)
    assert len(saved) == 3 and not warnings.seen
    assert heldout_prompt(trainer.store)[1], "the sample at the end of a run, from the files that are open"
    assert {path.joinpath("tokenizer.json").read_bytes() for path in saved} == {tokenizer}


def test_a_step_folder_without_a_manifest_is_named_and_never_overwritten(store: Path, tmp_path: Path) -> None:
    config = make_config(store, tmp_path / "run", train={"save_every": 2})
    fitted(config)
    run = tmp_path / "run/checkpoints"
    newest = run / "step-00000006"
    for path in (newest, run / "step-00000004"):
        (path / "manifest.json").unlink()
    before = {p.name: p.read_bytes() for p in (newest / "tensors").iterdir()}
    warnings = Warnings()
    trainer = started(config, warnings, resume="auto")
    assert trainer.position.step == 2
    older, last = trainer.warnings
    assert "step-00000006' is not complete: manifest.json" in last, "the newest one that was saved"
    assert "step-00000004' has no manifest.json, so it is incomplete" in older
    trainer.fit()
    assert [w for w in warnings.seen if "instead of overwritten" in w and "incomplete-step-00000006" in w]
    aside = run / "incomplete-step-00000006" / "tensors"
    assert {p.name: p.read_bytes() for p in aside.iterdir()} == before
    assert ckpt.open_checkpoint(newest).position.step == 6
    for path in ckpt.complete_checkpoints(run):  # all are damaged, and named
        for file in (path / "tensors").iterdir():
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            file.write_bytes(content)
    trainer = make_trainer(config)
    with pytest.raises(DamagedCheckpointError) as error:
        trainer.start(resume_candidates("auto", trainer.run))
    assert all(f"step-0000000{step}" in str(error.value) for step in (2, 4, 6)) and "\n" not in str(error.value)


def spoil(trained: Trained, where: str, value: float) -> None:
    fused = trained.fused_params[-1]
    target = fused.tensor if where == "weight" else trained.optimizer.moments[fused.tensor]["exp_avg_sq"]
    with torch.no_grad():
        target.view(-1)[-1] = value


@pytest.mark.parametrize(
    ("dtype", "where", "value"),
    [("float32", "weight", -float("inf")), ("bfloat16", "weight", float("nan")), ("float32", "moment", float("inf"))],
)
def test_values_that_are_not_finite_are_not_saved(tmp_path: Path, dtype: str, where: str, value: float) -> None:
    config = mesh_config(1)
    config = config.model_copy(update={"train": config.train.model_copy(update={"param_dtype": dtype})})
    trained, _ = save(tmp_path, config, 1)
    spoil(trained, where, value)
    kind = "model" if where == "weight" else "optim.exp_avg_sq"
    name = trained.fused_params[-1].slices[-1].parameter.name
    with pytest.raises(NonFiniteError, match=rf"step 2 was not saved: {kind}.{name} holds a value that is not finite"):
        save_at(tmp_path, trained, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def save_spoiled(folder: Path, config: Any) -> str:
    trained = Trained(config, 1)
    if trained.mesh.rank == 1:
        spoil(trained, "moment", float("nan"))
    saver = ckpt.CheckpointSaver(trained.model, trained.optimizer, config, b"{}", {}, trained.mesh)
    saver.start(folder, Position(1, 64))
    with pytest.raises(NonFiniteError) as error:
        saver.finish()
    return str(error.value)


def test_the_process_whose_values_are_not_finite_is_named_on_all(tmp_path: Path) -> None:
    for message in run_distributed(2, save_spoiled, tmp_path, mesh_config(2)):
        assert message.endswith("holds a value that is not finite on process 1")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("failing", ["the rename", "a kill"])
def test_a_save_of_the_same_step_keeps_the_checkpoint_that_it_replaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """The only one there is, until the new one has its name; and no later save removes it either."""
    config, rename = mesh_config(1), Path.rename

    class Killed(BaseException):
        pass

    def stop(path: Path, target: Path) -> Path:
        if path.suffix == ".tmp":
            raise Killed if failing == "a kill" else OSError(errno.EIO, "Input/output error")
        return rename(path, target)

    trained, path = save(tmp_path, config, 1)
    monkeypatch.setattr(Path, "rename", stop)
    with pytest.raises(Killed if failing == "a kill" else StorageError):
        save_at(tmp_path, trained, 1)
    monkeypatch.undo()
    kept = path.with_name(f"superseded-{path.name}") if failing == "a kill" else path
    assert load(kept, config)[1].step == 1
    save_at(tmp_path, trained, 2)
    assert load(kept, config)[1].step == 1


class Disk:
    """Makes saves of a run fail: a given number of times in its own folder and in its fallback folder."""

    def __init__(self, trainer: Trainer, warnings: Warnings, patch: pytest.MonkeyPatch) -> None:
        self.trainer, self.said = trainer, warnings.seen
        self.slept, self.failures = list[float](), dict[str, int]()
        patch.setattr(trainer.saves.saver, "save", self._save)
        patch.setattr("time.sleep", self.slept.append)

    def _save(self, folder: Path, _: Position) -> SavedCheckpoint:
        name = "run" if folder == self.trainer.run.checkpoints else "elsewhere"
        if self.failures.get(name, 0) > 0:
            self.failures[name] -= 1
            raise StorageError(f"not saved in '{folder}': No space left on device")
        return SavedCheckpoint(7, folder / "step-00000007")

    def last_save(self, minutes: float, urgent: bool = False, fallback: bool = False, **failures: int) -> str:
        """Which of the two folders has the checkpoint in the end."""
        self.failures = failures
        self.said.clear()
        self.slept.clear()
        trainer = self.trainer
        run = {"save_retry_minutes": minutes, "fallback_dir": "/spare" if fallback else ""}
        trainer.saves.config = trainer.config.changed(run=run)
        trainer.saves.elsewhere = ckpt.fallback_folder(trainer.saves.config)
        saved = trainer.save_last(urgent)
        assert saved is not None and saved.name == "step-00000007"
        return "run" if saved.parent == trainer.run.checkpoints else "elsewhere"


@pytest.fixture
def disk(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    warnings = Warnings()
    trainer = make_trainer(make_config(store, tmp_path / "run"), warnings)
    trainer.run.checkpoints.mkdir(parents=True)
    trainer.start([])
    return Disk(trainer, warnings, monkeypatch)


def test_the_last_save_retries_while_a_person_frees_space_but_not_for_ever(disk: Disk) -> None:
    assert disk.last_save(minutes=10, run=3) == "run"
    assert disk.slept == [5.0, 10.0, 20.0] and len(disk.said) == 3
    assert all("No space left" in said and "free disk space" in said for said in disk.said)
    assert sum(retry_waits(10)) == 600 and max(retry_waits(10)) == 60 and list(retry_waits(0)) == []
    with pytest.raises(StorageError, match="No space left"):
        disk.last_save(minutes=1, run=99)
    assert sum(disk.slept) == 60


@pytest.mark.parametrize("urgent", [False, True])
def test_the_last_save_goes_elsewhere(disk: Disk, urgent: bool) -> None:
    """Immediately if a signal stops the run, because the process may be killed soon; otherwise after the retries."""
    assert disk.last_save(minutes=1, urgent=urgent, fallback=True, run=99) == "elsewhere"
    assert any(disk.slept) != urgent
    assert "No space left on device; saving in '/spare" in disk.said[-1]
    assert disk.last_save(minutes=1, urgent=True, fallback=True, run=3, elsewhere=99) == "run", "both are full: retries"
    assert disk.said[1].startswith("not saved in '/spare") and "free disk space; retry 1 of" in disk.said[2]
    with pytest.raises(StorageError, match="not saved in '.*run/checkpoints'"):
        disk.last_save(minutes=0, urgent=urgent, fallback=True, run=1, elsewhere=1)


@pytest.mark.parametrize("background", [False, True], ids=["here", "background"])
def test_a_full_disk_costs_the_save_only(store: Path, tmp_path: Path, background: bool) -> None:
    """A disk that is full after the first save: later saves warn, and the last one succeeds once space is freed."""
    with small_disk(tmp_path / "disk", 20_000_000) as disk:
        config = make_config(store, disk / "run", train={"save_every": 1, "steps": 4, "async_save": background})

        def fill(trainer: Trainer) -> None:
            trainer.finish_save()  # which would give its space back if it failed
            with (disk / "filler").open("wb", buffering=0) as file:
                while os.statvfs(disk).f_bavail:
                    with contextlib.suppress(OSError):
                        file.write(bytes(4096))

        class FreeAtTheEnd(Warnings):
            def on_warning(self, trainer: Trainer, text: str) -> None:
                super().on_warning(trainer, text)
                if "free disk space" in text:
                    (disk / "filler").unlink()

        warnings = FreeAtTheEnd()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("boost.train.saves.FIRST_WAIT_S", 0.1)
            trainer = fitted(config, Do("after_step", 2, fill), warnings)
        full = [w for w in warnings.seen if "No space left on device" in w]
        assert len(full) >= 3 and sum("training continues" in w for w in full) == 2
        newest = ckpt.complete_checkpoints(trainer.run.checkpoints)
        assert [p.name for p in newest][-1] == "step-00000004"
        assert not list(trainer.run.checkpoints.glob(".step*"))
        with ckpt.verifying(newest[0], config.model, ALONE):
            pass
