"""Early stopping: when it ends a run, on all processes alike, and after a resume."""

import json
import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from boost.config import load
from boost.config.schema import TrainConfig
from boost.errors import ConfigError
from boost.train import loop
from boost.train.checkpoint import Position, open_checkpoint
from boost.train.evaluate import Evaluation
from boost.train.hooks import Hook, StepEnd
from boost.train.loop import Trainer
from boost.train.metrics import MetricsHook, read_metrics
from boost.train.outcome import TrainResult, early_stop
from tests.distributed import run_distributed
from tests.train.commands import toml
from tests.train.runs import make_config, make_trainer

LOSSES = {2: 5.0, 4: 4.0, 6: 3.95, 8: 4.1, 10: 3.9, 12: 3.0}
"""Held-out loss by step. The evaluation of step 6 is lower by less than 0.1."""


class Steps(Hook):
    def __init__(self) -> None:
        self.seen: list[int] = []

    def after_step(self, trainer: Trainer, event: StepEnd) -> None:
        self.seen.append(event.metrics.step)


def fit(store: Path, folder: Path, losses: dict[int, float], resume: Path | None = None, **train: Any) -> Any:
    """Trains with these held-out losses by step; returns the trainer, its result and the steps it ran."""
    settings = {"steps": 20, "eval_every": 2, "early_stopping_patience": 2, "keep": 100, **train}
    folder.mkdir(exist_ok=True)
    steps = Steps()
    trainer = make_trainer(make_config(store, folder, train=settings), steps, MetricsHook())

    def evaluate(*_: Any) -> Evaluation:
        loss = losses[trainer.position.step]
        return Evaluation(64, loss, math.exp(loss), loss)

    with mock.patch.object(loop, "evaluate", evaluate):
        trainer.start([resume] if resume else [])
        return trainer, trainer.fit(), steps.seen


def ended(trainer: Trainer, result: TrainResult) -> tuple[Any, ...]:
    assert result.stopped_by is None and result.evaluation is not None and result.checkpoint is not None
    saved = open_checkpoint(result.checkpoint)
    return result.position.step, saved.position.step, saved.position.best_heldout_loss, saved.position.stale_evaluations


@pytest.mark.parametrize(
    ("patience", "threshold", "expected"),
    [
        (1, 0.0, (8, 8, 3.95, 1)),
        (1, 0.1, (6, 6, 4.0, 1)),
        (2, 0.1, (8, 8, 4.0, 2)),
        (2, 0.0, (16, 16, 3.0, 2)),
    ],
)
def test_a_run_ends_at_its_patience_saved_and_evaluated(
    store: Path, tmp_path: Path, patience: int, threshold: float, expected: tuple[Any, ...]
) -> None:
    train = {"early_stopping_patience": patience, "early_stopping_threshold": threshold}
    trainer, result, steps = fit(store, tmp_path, {**LOSSES, 14: 3.0, 16: math.nan}, **train)
    assert ended(trainer, result) == expected
    assert steps == list(range(1, expected[0] + 1)), "no step follows the evaluation"
    assert result.early and f"in {expected[3]} evaluation" in result.early and f"{expected[2]:.4f}" in result.early
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [(line["step"], line["final"]) for line in lines if line["kind"] == "eval"][-2:] == [
        (expected[0], False),
        (expected[0], True),
    ]
    assert (lines[-1]["kind"], lines[-1]["state"], lines[-1]["reason"]) == ("end", "done", result.early)


def test_a_resumed_run_counts_on_and_one_that_has_ended_only_evaluates_again(store: Path, tmp_path: Path) -> None:
    losses = {2: 4.0, 4: 4.0, 6: 4.0, 8: 4.0, 10: 3.0, 12: 3.0, 14: 3.0}
    train = {"early_stopping_patience": 3, "save_every": 3, "async_save": False}
    whole, expected, _ = fit(store, tmp_path, losses, **train)
    assert ended(whole, expected) == (8, 8, 4.0, 3)
    middle, end = (whole.run.checkpoints / f"step-{step:08d}" for step in (6, 8))
    assert json.loads((middle / "state.json").read_text())["stale_evaluations"] == 2
    trainer, result, steps = fit(store, tmp_path, losses, middle, **train)
    assert ended(trainer, result) == (8, 8, 4.0, 3) and steps == [7, 8]
    before = (tmp_path / "metrics.jsonl").read_text()
    trainer, result, steps = fit(store, tmp_path, losses, end, **train)
    assert ended(trainer, result) == (8, 8, 4.0, 3) and steps == []
    more = {**train, "early_stopping_patience": 4}
    assert (tmp_path / "metrics.jsonl").read_text() == before, "the final evaluation is there once"
    trainer, result, steps = fit(store, tmp_path, {**losses, 16: 2.9, **dict.fromkeys(range(18, 30), 2.9)}, end, **more)
    assert ended(trainer, result) == (20, 20, 2.9, 1) and steps == list(range(9, 21)), "more patience: it goes on"
    assert result.early is None


def replicas(store: Path, folder: Path) -> list[Any]:
    settings = {"steps": 20, "eval_every": 2, "early_stopping_patience": 2, "early_stopping_threshold": 100.0}
    trainer = make_trainer(make_config(store, folder, train=settings, parallel={"dp": 2, "shard": "full"}))
    folder.mkdir(exist_ok=True)
    trainer.start([])
    result = trainer.fit()
    return [*ended(trainer, result), result.early]


def test_replicas_stop_after_the_same_step(store: Path, tmp_path: Path) -> None:
    first, second = run_distributed(2, replicas, store, tmp_path / "run")
    assert first == second and first[0] == first[1] == 6 and first[3] == 2


def test_a_rollback_takes_the_count_back(store: Path, tmp_path: Path) -> None:
    trainer = make_trainer(make_config(store, tmp_path, train={"early_stopping_patience": 5, "eval_every": 1}))
    tmp_path.joinpath("checkpoints").mkdir(exist_ok=True)
    trainer.start([])
    trainer.evaluate()
    best = trainer.position.best_heldout_loss
    path = trainer.save()
    assert path
    trainer.evaluate()
    assert (trainer.position.best_heldout_loss, trainer.position.stale_evaluations) == (best, 1)
    trainer.load(open_checkpoint(path))
    assert (trainer.position.best_heldout_loss, trainer.position.stale_evaluations) == (best, 0)


def test_the_patience_of_the_configuration_decides() -> None:
    position = Position(10, 640, best_heldout_loss=None, stale_evaluations=3)
    assert early_stop(position, TrainConfig(steps=20)) is None
    assert early_stop(position, TrainConfig(steps=20, early_stopping_patience=4)) is None
    reason = early_stop(position, TrainConfig(steps=20, early_stopping_patience=3))
    assert reason and "never finite" in reason
    assert early_stop(position, TrainConfig(steps=10, early_stopping_patience=3)) is None, (
        "it is at its last step anyway"
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--train.early_stopping_patience", "3"], "train.early_stopping_patience = 3 needs periodic evaluations"),
        (["--train.early_stopping_threshold", "0.1"], "train.early_stopping_threshold = 0.1 has no effect"),
        (["--train.sample_prompts", '["a"]'], "train.sample_prompts = .* set train.sample_tokens"),
        (["--train.sample_prompts", '[""]', "--train.sample_tokens", "3"], "contains an empty prompt"),
    ],
)
def test_what_has_no_effect_is_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(None, flags)


def test_the_command_says_so_and_exits_with_0(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from boost.cli.main import main

    config = tmp_path / "run.toml"
    train = {"steps": 50, "eval_every": 2, "early_stopping_patience": 2, "early_stopping_threshold": 100}
    config.write_text(f'{toml(store, tp=1, **train)}dir = "{tmp_path / "run"}"\n')
    threads = torch.get_num_threads()
    assert main(["train", str(config)]) == 0
    torch.set_num_threads(threads)
    out = capsys.readouterr().out
    assert "stopped early at step 6 of 50: no improvement of the held-out loss in 2 evaluations" in out
    assert "held-out perplexity" in out and "step-00000006" in out
