"""`boost checkpoint`: list, verify."""

import json
import shutil
from pathlib import Path

import pytest

from boost.train.metrics import MetricsHook
from boost.train.resume import resume_candidates
from tests.cli.commands import Capture, done, refused, say
from tests.data.inputs import flip
from tests.train.runs import fitted, make_config, make_trainer


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture(scope="module")
def trained(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 2, 4 and 6, where 6 is left over from before a restart at 4."""
    config = make_config(store, tmp_path_factory.mktemp("trained") / "run", train={"save_every": 2, "eval_every": 4})
    Path(config.run.dir).mkdir()
    trainer = fitted(config, MetricsHook())
    four = str(trainer.run.checkpoints / "step-00000004")
    make_trainer(config).start(resume_candidates(four, trainer.run))
    return trainer.run.path


def test_list(run: Path, capsys: Capture) -> None:
    checkpoints = run / "checkpoints"
    (checkpoints / "step-00000002" / "manifest.json").unlink()
    rows = json.loads(done(capsys, "checkpoint", "list", run, "--json"))
    assert [(row["step"], row["state"]) for row in rows] == [(2, "incomplete"), (4, "complete"), (6, "superseded")]
    assert [row["heldout_loss"] is not None for row in rows] == [False, True, False]
    assert all(row["bytes"] > 10_000 and row["saved"].startswith("20") for row in rows)
    (shard,) = (checkpoints / "step-00000004" / "tensors").iterdir()
    shard.write_bytes(shard.read_bytes()[:-1])
    code, out, _ = say(capsys, "checkpoint", "list", run)
    assert code == 0 and "damaged" in out and shard.name in out and "no manifest.json" in out


def test_list_leaves_out_metrics_of_a_wrong_shape(run: Path, capsys: Capture) -> None:
    metrics = run / "metrics.jsonl"
    metrics.write_text('{"kind": "eval", "step": 4}\n{"kind": "eval", "heldout_loss": []}\n' + metrics.read_text())
    assert "metrics.jsonl: 2 unreadable lines, the first is line 1" in done(capsys, "checkpoint", "list", run)
    rows = json.loads(say(capsys, "checkpoint", "list", run, "--json")[1])
    assert [row["heldout_loss"] is not None for row in rows] == [False, True, False]


def test_verify_names_each_file_that_is_damaged(run: Path, capsys: Capture) -> None:
    (run / "checkpoints/step-00000004/.DS_Store").touch()
    code, out, err = say(capsys, "checkpoint", "verify", run)
    assert code == 0 and out.count("intact") == 3, "a file that no manifest lists is no damage"
    (shard,) = (run / "checkpoints/step-00000002/tensors").iterdir()
    flip(shard)
    code, out, err = say(capsys, "checkpoint", "verify", run)
    assert code == 1 and f"step-00000002' is damaged: tensors/{shard.name} has changed" in err
    assert out.count("intact") == 2, "the others are verified too"
    code, out, _ = say(capsys, "checkpoint", "verify", run / "checkpoints/step-00000004", "--json")
    assert code == 0 and [row["intact"] for row in json.loads(out)] == [True]
    (run / "checkpoints/step-00000004/manifest.json").unlink()
    code, _, err = say(capsys, "checkpoint", "verify", run)
    assert code == 1 and "step-00000004' is incomplete: no manifest.json" in err


@pytest.mark.parametrize("action", ["list", "verify"])
def test_no_checkpoint_is_one_line(tmp_path: Path, capsys: Capture, action: str) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        assert str(path) in refused(capsys, "checkpoint", action, path)
