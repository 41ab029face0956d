"""A run whose directory is deleted, renamed or replaced ends before it writes to what is there now."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from boost.errors import CheckpointError, LostRunError, StorageError
from boost.train import checkpoint as ckpt
from boost.train.checkpoint import SavedCheckpoint, commit, complete_checkpoints, find_checkpoint, open_checkpoint
from boost.train.checkpoint.write import write_snapshot
from boost.train.loop import Trainer
from boost.train.metrics import MetricsHook, read_metrics
from boost.train.resume import require_nothing_lost, resume_candidates
from boost.train.run_lock import RunLock
from tests.cli.commands import Capture, say
from tests.distributed import run_distributed
from tests.train.commands import Command, saved_steps, training
from tests.train.runs import Do, Warnings, losses, make_config, make_trainer, started

FAST = ("--train.save_every", "5", "--train.keep", "2", "--train.eval_every", "0")


@pytest.mark.slow
def test_a_run_whose_directory_was_replaced_ends_and_leaves_the_other_run_alone(store: Path, tmp_path: Path) -> None:
    with Command(tmp_path, store, *FAST) as first:
        first.wait_for(lambda: saved_steps(first.run))
        first.run.rename(tmp_path / "deleted")
        with Command(tmp_path, store, *FAST, "--train.steps", "20") as second:
            code, _, err = second.finish()
            assert code == 0, err
        code, _, err = first.finish()
    run = tmp_path / "run"
    assert code == 2 and "Traceback" not in err, err
    assert f"boost: error: run.dir = '{run}' " in err and ("now belongs to" in err or "has no run.lock" in err)
    assert saved_steps(run) == [15, 20] and open_checkpoint(run).position.step == 20
    assert len(losses(run)) == 20, "each step once"


@pytest.mark.slow
@pytest.mark.parametrize("background", ["true", "false"])
def test_a_run_whose_directory_was_renamed_ends(store: Path, tmp_path: Path, background: str) -> None:
    words = (*FAST, "--train.async_save", background, "--run.fallback_dir", str(tmp_path / "spare"))
    with Command(tmp_path, store, *words) as command:
        command.wait_for(lambda: saved_steps(command.run))
        command.run.rename(tmp_path / "renamed")
        code, out, err = command.finish()
    assert code == 2 and "run.lock any more: it was deleted, renamed or replaced" in err and "Traceback" not in err, err
    assert not (tmp_path / "run").exists()
    newest = saved_steps(tmp_path / "renamed")[-1]
    (spare,) = complete_checkpoints(ckpt.fallback_folder(make_config(store, tmp_path / "run", run=spare_of(tmp_path))))  # type: ignore[arg-type]
    assert f"saved '{spare}', because the run directory is lost" in out + err
    assert open_checkpoint(spare).position.step >= newest, "nothing is lost"


def spare_of(folder: Path) -> dict[str, Any]:
    return {"fallback_dir": str(folder / "spare"), "save_retry_minutes": 0.0}


def lose(folder: Path, store: Path, background: bool) -> tuple[str, int]:
    """Trains with a lock that another run takes before the second save. Returns the error and the number of steps done."""
    train = {"save_every": 2, "async_save": background, "keep": 9}
    config = make_config(store, folder, tp=2, train=train, run=spare_of(folder.parent))

    def take(trainer: Trainer) -> None:
        assert isinstance(trainer.run.lock, RunLock)
        trainer.run.lock.path.unlink()
        RunLock(folder)._create()

    saved = Do("after_step", 3, Trainer.finish_save)  # however long the first save takes
    trainer = make_trainer(config, MetricsHook(), saved, Do("after_step", 3, take, rank=0))
    if trainer.mesh.is_main:
        folder.mkdir()
        trainer.run.lock = RunLock(folder).__enter__()
    trainer.start([])
    with pytest.raises(LostRunError, match="now belongs to process"):
        trainer.fit()
    if isinstance(trainer.run.lock, RunLock):
        trainer.run.lock.__exit__()
    return "", trainer.position.step


@pytest.mark.parametrize("background", [False, True])
def test_all_processes_end_before_they_publish_remove_or_append(store: Path, tmp_path: Path, background: bool) -> None:
    folder = tmp_path / "run"
    steps = [step for _, step in run_distributed(2, lose, folder, store, background)]
    assert steps[0] == steps[1] and steps[0] in (4, 5)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000002"]
    assert [line["step"] for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == "step"][:4] == [
        1,
        2,
        3,
        4,
    ]
    assert (folder / "last-saved.json").read_text() == '{"step": 2}\n'
    assert (folder / "run.lock").exists(), "the other run's"
    assert not (tmp_path / "spare").exists(), "there, too, the other run would resume from these weights"


def test_a_run_whose_lock_is_garbage_saves_elsewhere(store: Path, tmp_path: Path) -> None:
    """Where it cannot tell whether it is the owner, it neither writes nor removes anything."""
    config = make_config(store, tmp_path / "run", train={"save_every": 2, "async_save": False}, run=spare_of(tmp_path))
    warnings = Warnings()

    def spoil(trainer: Trainer) -> None:
        assert trainer.run.lock
        trainer.run.lock.path.write_text("{")
        os.kill(os.getpid(), signal.SIGTERM)

    trainer = make_trainer(config, Do("after_step", 3, spoil), warnings)
    with RunLock(tmp_path / "run") as trainer.run.lock:
        trainer.start([])
        result = trainer.fit()
    assert result.by_signal and result.checkpoint and result.checkpoint.is_relative_to(tmp_path / "spare")
    assert open_checkpoint(result.checkpoint).position.step == trainer.position.step == 4
    assert saved_steps(tmp_path / "run") == [2] and (tmp_path / "run/last-saved.json").read_text() == '{"step": 2}\n'
    assert sum("run.lock cannot be read: it names no owner" in text for text in warnings.seen) == 3, "of three writes"


def test_a_directory_that_is_renamed_during_a_save_is_lost(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the checkpoint has its final name, before its manifest is looked at."""
    folder, usual = tmp_path / "run", commit.sync

    def sync(path: Path) -> None:
        usual(path)
        if (folder / "checkpoints" / "step-00000002").exists():
            folder.rename(tmp_path / "renamed")

    trainer = make_trainer(make_config(store, folder, train={"save_every": 2}), MetricsHook())
    folder.mkdir()
    trainer.run.lock = RunLock(folder).__enter__()
    trainer.start([])
    monkeypatch.setattr(commit, "sync", sync)
    with pytest.raises(LostRunError, match="it was deleted, renamed or replaced"):
        trainer.fit()
    trainer.run.lock.__exit__()
    assert not folder.exists() and (tmp_path / "renamed" / "checkpoints" / "step-00000002").exists()


def test_the_last_checkpoint_is_found_wherever_it_was_saved(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In run.fallback_dir, also without that option and under another name of the directory. A run that resumes from an earlier
    checkpoint supersedes it there, too."""
    link, real = tmp_path / "link", tmp_path / "real"
    real.mkdir()
    link.symlink_to(real)
    options: dict[str, Any] = {"train": {"save_every": 2, "steps": 5}}
    spare = {"save_retry_minutes": 0.0, "fallback_dir": str(tmp_path / "spare")}
    config = make_config(store, link / "run", **options, run=spare)

    def fill(trainer: Trainer) -> None:
        def refuse(folder: Path, *rest: Any) -> SavedCheckpoint:
            if folder == trainer.run.checkpoints:
                raise StorageError("No space left on device")
            return write_snapshot(folder, *rest)

        monkeypatch.setattr("boost.train.checkpoint.write.write_snapshot", refuse)

    result = started(config, Do("after_step", 4, fill)).fit()
    under_real_name = make_config(store, real / "run", **options, run=spare)
    folder = tmp_path / "spare" / (real / "run").relative_to("/") / "checkpoints"
    assert folder == ckpt.fallback_folder(config) == ckpt.fallback_folder(under_real_name)
    assert result.checkpoint == folder / "step-00000005"
    for later in (
        under_real_name,
        make_config(store, real / "run", **options),
        make_config(store, link / "run", **options),
    ):
        trainer = make_trainer(later)
        found = resume_candidates("auto", trainer.run, ckpt.fallback_folder(later))
        assert found[0] == ckpt.checkpoint_path(folder, 5) and len(set(found)) == len(found) == 2
        require_nothing_lost(trainer.run, found, restart=False)
    trainer.start(found)
    assert trainer.position.step == 5 and not trainer.warnings
    folder.rename(tmp_path / "unmounted")
    with pytest.raises(CheckpointError, match=f"newest checkpoint in '{folder}/step-00000005', but it is not there"):
        require_nothing_lost(trainer.run, resume_candidates("auto", trainer.run), restart=False)
    (tmp_path / "unmounted").rename(folder)
    started(under_real_name, resume=str(real / "run/checkpoints/step-00000002"))
    assert complete_checkpoints(folder) == []


@pytest.mark.slow
def test_a_newest_checkpoint_that_was_deleted_is_missed(store: Path, tmp_path: Path, capsys: Capture) -> None:
    words = training(tmp_path, store, *FAST, "--parallel.tp", "1", "--train.steps", "20")[3:]
    assert say(capsys, *words)[0] == 0
    run = tmp_path / "run"
    metrics = (run / "metrics.jsonl").read_bytes()
    newest = find_checkpoint(run)
    shutil.rmtree(newest)
    code, _, err = say(capsys, *words, "--resume", "auto")
    older = run / "checkpoints/step-00000015"
    assert code == 2 and f"saved its newest checkpoint in '{newest}', but it is not there" in err, err
    assert f"'--resume {older}' resumes from the newest one found" in err
    assert (run / "metrics.jsonl").read_bytes() == metrics
    assert say(capsys, *words, "--resume", older)[0] == 0 and saved_steps(run) == [15, 20]
    assert say(capsys, *words, "--resume", "auto")[0] == 0, "nothing is missing any more"
