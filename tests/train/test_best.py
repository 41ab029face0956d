"""The best checkpoint: how it is chosen, and how commands find it."""

import json
import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from boost.errors import CheckpointError
from boost.train import judge
from boost.train.checkpoint import find_checkpoint, open_checkpoint, read_best
from boost.train.evaluate import Evaluation
from tests.cli.commands import say
from tests.train.runs import make_config, make_trainer, started


def fit(store: Path, folder: Path, losses: list[float], **train: Any) -> Path:
    """A run of 6 steps whose evaluations have these held-out losses; its directory."""
    settings = {"steps": 6, "eval_every": 2, "keep_best": True, "keep": 1, **train}
    trainer = make_trainer(make_config(store, folder, train=settings))
    left = iter(losses)

    def evaluate(*_: Any) -> Evaluation:
        loss = next(left)
        return Evaluation(64, loss, math.exp(loss), loss)

    with mock.patch.object(judge, "evaluate", evaluate):
        trainer.start([])
        trainer.fit()
    assert next(left, None) is None
    return folder


@pytest.mark.parametrize(
    ("losses", "train", "best"),
    [
        ([4.0, 5.0, 4.5], {}, 2),
        ([4.0, 3.0, 4.5], {}, 4),
        ([4.0, 3.0, 4.5], {"save_every": 1}, 4),
        ([4.0, 3.0, 2.0], {}, 6),
        # The final evaluation is of all tokens, so it is compared with none that is not.
        ([4.0, 3.0, 3.5, 2.0], {"eval_tokens": 64}, 4),
        ([4.0, 3.0, 2.5, 9.0], {"eval_tokens": 64}, 6),
    ],
)
def test_which_checkpoint_is_the_best(
    store: Path, tmp_path: Path, losses: list[float], train: dict[str, Any], best: int
) -> None:
    run = fit(store, tmp_path / "run", losses, **train)
    for path in (f"{run}@best", f"{run}/@best", f"{run}/checkpoints@best"):
        assert find_checkpoint(Path(path)).name == f"step-{best:08d}"
    assert find_checkpoint(run).name == "step-00000006"
    recorded = {"step": best, "heldout_loss": losses[best // 2 - 1]}
    assert json.loads((run / "checkpoints/best.json").read_text()) == recorded


def test_commands_take_the_best_checkpoint(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = fit(store, tmp_path / "run", [4.0, 5.0, 4.5])
    best = f"{run}@best"
    code, out, _ = say(capsys, "eval", best, "--max-tokens", 64, "--json")
    assert code == 0 and json.loads(out)["step"] == 2
    assert say(capsys, "generate", best, "--prompt", "def", "--max-tokens", 2)[0] == 0
    code, out, err = say(capsys, "export", best, "--out", tmp_path / "exported", "--json")
    assert code == 0, err
    code, out, _ = say(capsys, "checkpoint", "list", run, "--json")
    assert [(row["step"], row["best"]) for row in json.loads(out)] == [(2, True), (6, False)]
    assert "complete, best" in say(capsys, "checkpoint", "list", run)[1]
    trainer = started(make_config(store, run, train={"steps": 6}), resume=best)
    assert trainer.run.continued_by(best) and not trainer.run.continued_by(f"{tmp_path}/other@best")
    assert trainer.position.step == 2


def test_no_best_checkpoint_is_one_line(store: Path, tmp_path: Path) -> None:
    run = fit(store, tmp_path / "run", [4.0, 5.0, 4.5], keep_best=False)
    with pytest.raises(CheckpointError, match=r"run@best': no best .* use '.*step-00000006'"):
        open_checkpoint(Path(f"{run}@best"))
    with pytest.raises(CheckpointError, match="no such folder"):
        open_checkpoint(tmp_path / "nowhere@best")


def test_a_best_checkpoint_of_an_abandoned_branch_is_none(store: Path, tmp_path: Path) -> None:
    run = fit(store, tmp_path / "run", [4.0, 3.0, 4.5], keep=9)
    started(make_config(store, run, train={"steps": 6}), resume=str(run / "checkpoints/step-00000002"))
    assert read_best(run / "checkpoints") is None
