"""Commands that read a run's newest checkpoint while the run saves newer ones and removes that one."""

import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import boost
from boost.config import Config
from boost.errors import CheckpointError, DamagedCheckpointError, RemovedCheckpointError
from boost.parallel.mesh import Mesh
from boost.train import checkpoint as ckpt
from boost.train.checkpoint import WeightReader, load, read_checkpoint
from boost.train.teacher import Teacher
from tests import toy
from tests.cli.commands import Capture, say
from tests.distributed import run_distributed
from tests.train.runs import fitted, make_config, make_trainer

ROTATED = "was rotated away by its run while it was read"


@pytest.fixture(scope="module")
def trained(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model with checkpoints at steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    fitted(dense_config(store, folder, train={"save_every": 2, "keep": 9}))
    return folder


def dense_config(store: Path, folder: Path, tp: int = 1, **sections: Any) -> Config:
    parallel = {"layout": "megatron"} if tp > 1 else {}
    return make_config(store, folder, tp, "float32", model={"family": "dense"}, parallel=parallel, **sections)


class LiveRun:
    """A run after step 4. `rotate` saves step 6 and removes step 4 when it is first called, as with train.keep = 1."""

    def __init__(self, trained: Path, run: Path) -> None:
        self.run, self.later = Path(shutil.copytree(trained, run)), run.with_name(f"{run.name}-later")
        self.checkpoints = run / "checkpoints"
        (self.checkpoints / "step-00000006").rename(self.later)

    def rotate(self) -> None:
        if self.later.exists():
            self.later.rename(self.checkpoints / "step-00000006")
            four = self.checkpoints / "step-00000004"
            shutil.rmtree(four.rename(four.with_name(".step-00000004.0.old")))


@pytest.fixture
def live(trained: Path, tmp_path: Path) -> LiveRun:
    return LiveRun(trained, tmp_path / "run")


def before(patch: pytest.MonkeyPatch, owner: Any, name: str, action: Callable[[], None]) -> None:
    """Makes `owner.name` call `action` first."""
    usual = getattr(owner, name)

    def wrapped(*words: Any, **named: Any) -> Any:
        action()
        return usual(*words, **named)

    patch.setattr(owner, name, wrapped)


@pytest.fixture(params=["verifying", "read_slices", "from_file"])
def rotated(request: pytest.FixtureRequest, live: LiveRun, monkeypatch: pytest.MonkeyPatch) -> LiveRun:
    """It rotates before the digests are checked, before a tensor is read, or between the two times that a file is opened."""
    before(monkeypatch, torch.UntypedStorage if request.param == "from_file" else load, request.param, live.rotate)
    return live


@pytest.mark.parametrize(
    "words",
    [
        ["export", "RUN", "--out", "OUT"],
        ["eval", "RUN", "--device", "cpu"],
        ["generate", "RUN", "--device", "cpu", "--prompt", "import ", "--max-tokens", 4],
        ["import", "RUN", "--out", "OUT", "--rank", 4, "--device", "cpu"],
    ],
    ids=lambda words: words[0],
)
def test_a_command_reads_the_newest_checkpoint_instead(
    rotated: LiveRun, tmp_path: Path, capsys: Capture, caplog: pytest.LogCaptureFixture, words: list[object]
) -> None:
    places = {"RUN": rotated.run, "OUT": tmp_path / "out"}
    code, out, err = say(capsys, *(places.get(str(word), word) for word in words), "--json")
    assert code == 0 and json.loads(out), err
    assert sum(ROTATED in text for text in caplog.messages) == 1
    assert words[0] != "eval" or json.loads(out)["step"] == 6
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        {"run", *("out" for word in words if word == "OUT")}
    )


def test_a_model_a_teacher_and_a_new_run_read_the_newest_checkpoint_instead(
    trained: Path, tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = weights(trained)

    def model(run: Path) -> Any:
        return boost.Model.from_pretrained(run).decoder

    def teacher(run: Path) -> Any:
        config = dense_config(store, tmp_path / "student", distill={"teacher": str(run)})
        return Teacher(config, Mesh(toy.CPU)).decoder

    def new_run(run: Path) -> Any:
        trainer = make_trainer(dense_config(store, tmp_path / "new"))
        trainer.start([], str(run))
        assert trainer.started_from == run / "checkpoints/step-00000006"
        return trainer.model

    for reader in (model, teacher, new_run):
        live = LiveRun(trained, tmp_path / reader.__name__)
        with monkeypatch.context() as patch:
            before(patch, load, "read_slices", live.rotate)
            found = toy.weights(reader(live.run))
        assert not live.later.exists() and all(torch.equal(found[name], newest[name]) for name in newest), reader


def weights(run: Path) -> dict[str, torch.Tensor]:
    reader = WeightReader(ckpt.open_checkpoint(run))
    return {name: reader.read(name) for name in reader.names()}


def test_all_processes_read_the_same_checkpoint(trained: Path, tmp_path: Path) -> None:
    """The run saves and rotates before only one of them has looked, and again while they read."""
    run_distributed(2, _read_together, trained, tmp_path)


def _read_together(trained: Path, tmp_path: Path) -> None:
    model, mesh = toy.toy_model(dense_config(tmp_path / "store", tmp_path, tp=2), seed=4)
    with pytest.MonkeyPatch.context() as patch:
        live = LiveRun(trained, tmp_path / f"run{mesh.rank}")
        # Each process sees another state: the other one's folder has no step 6 yet, as on a slow network file system.
        if mesh.rank == 1:
            live.rotate()
        names = [live.run] * 2
        torch.distributed.all_gather_object(names, live.run)
        before(patch, load, "verifying", live.rotate)

        def read(checkpoint: ckpt.Checkpoint) -> Path:
            ckpt.load_weights(checkpoint, model, mesh)
            return checkpoint.path

        assert read_checkpoint(live.run, read, mesh) == names[0] / "checkpoints/step-00000006"
        expected, found = toy.local_parts(model, weights(trained)), toy.weights(model)
        assert all(torch.equal(found[name], expected[name]) for name in found)


def test_a_checkpoint_that_was_named_is_not_replaced_by_another(
    rotated: LiveRun, tmp_path: Path, capsys: Capture
) -> None:
    four = rotated.checkpoints / "step-00000004"
    code, out, err = say(capsys, "export", four, "--out", tmp_path / "out")
    assert (code, out, err.count("\n")) == (2, "", 1) and f"'{four}' {ROTATED}" in err and "train.keep" in err


def test_a_run_that_rotates_each_time_ends_the_attempts(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, tried = Path(shutil.copytree(trained, tmp_path / "run")), list[Path]()

    def read(checkpoint: ckpt.Checkpoint) -> None:
        tried.append(checkpoint.path)
        aside = checkpoint.path.rename(run / "aside")
        shutil.copytree(aside, checkpoint.path)  # another folder of the same name
        shutil.rmtree(aside)
        raise DamagedCheckpointError("a file has changed")

    paused: list[float] = []

    def open_late(*arguments: Any, pauses: Iterator[float]) -> ckpt.Checkpoint:
        """Uses one pause, as if another process did not see a file yet."""
        paused.extend(itertools.islice(pauses, 1))
        return usual(*arguments, pauses=pauses)

    usual = load.open_on_all
    monkeypatch.setattr(load, "open_on_all", open_late)
    with pytest.raises(RemovedCheckpointError, match=ROTATED):
        read_checkpoint(run, read)
    assert len(tried) == load.ATTEMPTS
    assert paused == sorted({*paused}), "one minute, however many checkpoints are tried"


def test_damage_is_reported_at_once_and_without_a_traceback(trained: Path, tmp_path: Path, capsys: Capture) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    (shard,) = (run / "checkpoints/step-00000006/tensors").iterdir()
    with pytest.MonkeyPatch.context() as patch:
        before(patch, load, "read_slices", lambda: shard.unlink(missing_ok=True))
        code, _, err = say(capsys, "export", run, "--out", tmp_path / "out")
    assert (code, err.count("\n")) == (2, 1) and "step-00000006' cannot be read: " in err and shard.name in err
    reader = WeightReader(ckpt.open_checkpoint(run / "checkpoints/step-00000004"))
    with pytest.MonkeyPatch.context() as patch:
        before(patch, load, "read_slices", interrupt)
        with pytest.raises(KeyboardInterrupt):
            reader.read("embed")
    with pytest.raises(CheckpointError, match="tensors/.* is missing"):
        read_checkpoint(run, WeightReader)


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("action", ["list", "verify"])
def test_a_checkpoint_that_is_gone_is_not_damaged(trained: Path, tmp_path: Path, capsys: Capture, action: str) -> None:
    for place in ("read_manifest", "check_size", "read_structure"):
        live = LiveRun(trained, tmp_path / place)
        with pytest.MonkeyPatch.context() as patch:
            before(patch, ckpt.verify, place, live.rotate)
            code, out, err = say(capsys, "checkpoint", action, live.run)
        assert code == 0 and "damaged" not in out + err, (out, err)
        assert action == "list" or "step-00000004: rotated away meanwhile\n" in out
    live = LiveRun(trained, tmp_path / "one")
    with pytest.MonkeyPatch.context() as patch:
        before(patch, ckpt.verify, "read_structure", live.rotate)
        code, _, err = say(capsys, "checkpoint", action, live.checkpoints / "step-00000004")
    assert (code, err.count("\n")) == (2, 1) and "rotated every checkpoint away meanwhile" in err
