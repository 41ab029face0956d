"""Training trouble: detection, keeping healthy checkpoints, and rollback."""

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from boost.cli.checkpoint import inspect
from boost.config import Config, load, presets
from boost.errors import TrainingError
from boost.train import checkpoint as ckpt
from boost.train import loop
from boost.train.builtin_hooks import PeriodicCheckpoint
from boost.train.checkpoint.commit import rotated
from boost.train.events import Rollback, SaveEnd, StepMetrics, StepStart
from boost.train.health import MIN_HEALTHY, RECOVERED, SpikeDetector
from boost.train.hooks import Hook
from boost.train.loop import Trainer
from boost.train.metrics import MetricsHook, read_metrics
from tests.distributed import run_distributed
from tests.train.commands import saved_steps
from tests.train.runs import RATE, Scale, Warnings, fitted, make_config, make_trainer, started

VOCABULARY = 300


def metrics(loss: float, gradient_norm: float = 1.0, step: int = 1) -> StepMetrics:
    return StepMetrics(step, loss, RATE, gradient_norm, 1.0, 0.1, 1, 1, 1.0)


def detector(steps: int = MIN_HEALTHY, sigma: float = 6.0) -> SpikeDetector:
    """A detector after some healthy steps with losses around 2 and a deviation of 0.1."""
    found = SpikeDetector(sigma, VOCABULARY)
    for step in range(steps):
        assert found.judge(metrics(2 + 0.1 * (-1) ** step, 1 + 0.1 * (-1) ** step), skipped=False) is None
    return found


@pytest.mark.parametrize(
    ("loss", "norm", "kind"),
    [
        (2.59, 1.0, None),
        (2.61, 1.0, "spike"),
        (2.31, 1.59, None),
        (2.31, 1.61, "spike"),
        (2.29, 50.0, None),
        (9.0, 1.0, "diverged"),
    ],
)
def test_what_is_far_above_the_recent_steps_is_a_spike(loss: float, norm: float, kind: str | None) -> None:
    """A loss 6 deviations above; 3 if the gradient norm is 6 above; a gradient norm alone, as in young runs, is not."""
    found = detector().judge(metrics(loss, norm), skipped=False)
    assert (found[0] if found else None) == kind


def test_neither_a_spike_nor_a_huge_gradient_norm_is_remembered_as_usual() -> None:
    found = detector()
    for _ in range(2 * MIN_HEALTHY):
        spike = found.judge(metrics(5.0), skipped=False)
        assert spike and spike[0] == "spike"
    found = detector()
    assert found.judge(metrics(2.0, 1e6), skipped=False) is None
    spike = found.judge(metrics(2.4, 1e6), skipped=False)
    assert spike and "3 standard deviations" in spike[1] and "with gradient norm 1e+06" in spike[1]


def test_few_steps_and_sigma_zero_know_no_spike_but_every_divergence_and_steps_all_alike_leave_room_for_noise() -> None:
    for few in (detector(MIN_HEALTHY - 1), detector(sigma=0.0)):
        assert few.judge(metrics(8.0), skipped=False) is None
        diverged = few.judge(metrics(1.6 * math.log(VOCABULARY)), skipped=False)
        assert diverged and diverged[0] == "diverged"
    found = SpikeDetector(6.0, VOCABULARY)
    for _ in range(MIN_HEALTHY):
        found.judge(metrics(2.0), skipped=False)
    assert found.judge(metrics(2.2), skipped=False) is None
    found = SpikeDetector(6.0, VOCABULARY)
    for step in range(MIN_HEALTHY + 1):  # norms whose squares overflow
        assert found.judge(metrics(2.0, 1e200 * (step % 2)), skipped=False) is None


class Rates(Warnings):
    """Changes the learning rate at given steps, and records warnings and rollbacks."""

    def __init__(self, rates: dict[int, float]) -> None:
        super().__init__()
        self.rates, self.lr = rates, RATE
        self.rollbacks: list[Rollback] = []

    def before_step(self, trainer: Trainer, event: StepStart) -> None:
        self.lr = self.rates.pop(event.step, self.lr)
        step = trainer.optimizer.step
        trainer.optimizer.step = lambda number, lr: (step(number, self.lr), setattr(trainer.optimizer, "step", step))  # type: ignore[assignment, func-returns-value]

    def on_rollback(self, trainer: Trainer, event: Rollback) -> None:
        self.rollbacks.append(event)
        self.lr = RATE


def every_step(store: Path, run: Path, tp: int = 1, **train: Any) -> Config:
    return make_config(store, run, tp, "float32", train={"save_every": 1, "steps": 12, "async_save": False, **train})


@pytest.mark.parametrize(("background", "keep"), [(True, 1), (False, 3)])
def test_ruined_weights_never_push_out_the_last_good_checkpoint(
    store: Path, tmp_path: Path, background: bool, keep: int
) -> None:
    """The seventh update ruins the weights, which the eighth loss shows: the checkpoint of step 6 stays after any number of
    resumes."""
    config = every_step(store, tmp_path, keep=keep, async_save=background)
    hook = Rates({7: 1e30})
    trainer = started(config, hook)
    with pytest.raises(TrainingError, match="step-00000006"):
        trainer.fit()
    assert 6 in saved_steps(trainer.run.path) and max(saved_steps(trainer.run.path)) == 7
    (said,) = [text for text in hook.seen if "checkpoints are marked until training has recovered" in text]
    assert "step-00000006' is kept" in said
    for _ in range(2):
        again = started(config, Rates({8: 1e30}), resume="auto")
        with pytest.raises(TrainingError):
            again.fit()
        assert 6 in saved_steps(again.run.path)


def test_a_finite_explosion_is_not_saved_periodically_and_marked_at_the_end(store: Path, tmp_path: Path) -> None:
    hook = Rates({5: 50.0})
    trainer = started(every_step(store, tmp_path, keep=1), hook)
    result = trainer.fit()
    assert result.evaluation and 1.5 * math.log(VOCABULARY) < result.evaluation.loss < math.inf
    assert saved_steps(trainer.run.path) == [4, 5, 12], "proven; saved before the loss showed it; the end of the run"
    assert ckpt.open_checkpoint(tmp_path / "checkpoints/step-00000012").position.trouble.startswith("diverged at step")
    assert any(text.startswith("diverged at step 6") for text in hook.seen)

    again = started(every_step(store, tmp_path, keep=1, steps=13), resume="auto")
    assert again.position.step == 5 and again.position.trouble == ""
    assert any("step-00000012' is newer but was skipped: diverged" in text for text in again.warnings)


class Spike(Hook):
    """Reports a different loss for one step."""

    def __init__(self, step: int, loss: float) -> None:
        self.step, self.loss = step, loss

    def setup(self, trainer: Trainer) -> None:
        self.usual = usual = loop.step_metrics

        def metrics_of(*arguments: Any) -> StepMetrics:
            found = usual(*arguments)
            return found if found.step != self.step else StepMetrics(**{**vars(found), "loss": self.loss})

        loop.step_metrics = metrics_of

    def teardown(self, trainer: Trainer) -> None:
        loop.step_metrics = self.usual


class Saves(Warnings):
    """Marks of every checkpoint when it was saved, and warnings."""

    def __init__(self) -> None:
        super().__init__()
        self.marks: dict[int, tuple[str, str]] = {}

    def after_save(self, trainer: Trainer, event: SaveEnd) -> None:
        self.marks[event.step] = ckpt.marks_of(event.path)


DIVERGED_4 = "diverged at step 4: loss 100 is above 8.556, 1.5 x ln(vocabulary)"


def test_a_checkpoint_in_trouble_is_marked_and_repeated_at_its_end(store: Path, tmp_path: Path) -> None:
    config = every_step(store, tmp_path, steps=4 + RECOVERED + 3, save_every=5, keep=9)
    saves = Saves()
    trainer = fitted(config, Spike(4, 100.0), saves)
    # 5 and 10 are marked; asked for after step 12, the step after it saves; the last step saves.
    assert saves.marks == {5: ("", DIVERGED_4), 10: ("", DIVERGED_4), 4 + RECOVERED + 1: ("", ""), 15: ("", "")}
    assert saved_steps(trainer.run.path) == [4 + RECOVERED + 1, 15]


def run_until(config: Config, *hooks: Hook, resume: str | None = None) -> tuple[Trainer, Saves]:
    """A run that may be killed, without a last save."""
    saves = Saves()
    trainer = started(config, *hooks, saves, resume=resume)
    with contextlib.suppress(KeyboardInterrupt):
        trainer.fit()
    return trainer, saves


def test_a_young_run_in_doubt_is_saved_and_can_be_killed(store: Path, tmp_path: Path) -> None:
    """A spike right before the first checkpoint is due: it is saved and marked, a run that resumes from it is still in doubt and
    recovers, and then saves an unmarked one."""
    config = every_step(store, tmp_path, steps=60, save_every=40, keep=1)
    _, saves = run_until(config, Scale(0, 1.0, kill_after=44), Spike(39, 8.0))
    assert [text.partition(":")[0] for text in saves.seen] == ["spike at step 39"]
    assert "no checkpoint has been proven yet" in saves.seen[0]
    ((step, (trouble, doubt)),) = saves.marks.items()
    assert (step, trouble) == (40, "") and doubt.startswith("spike at step 39")
    listed = inspect(ckpt.checkpoint_path(tmp_path / "checkpoints", 40))
    assert (listed["state"], listed["problem"]) == ("complete", f"unproven: {doubt}")
    again, saves = run_until(config, resume="auto")
    assert any("step-00000040' is not proven: spike at step" in text for text in again.warnings)
    recovered = next(text for text in saves.seen if "training has recovered" in text)
    assert saves.marks[60] == ("", "") and again.judge.trouble is None and recovered
    assert saved_steps(again.run.path) == [60]


@pytest.mark.slow
@pytest.mark.parametrize("save_every", [pytest.param(1, marks=pytest.mark.nightly), 4])
def test_weights_that_are_finite_and_worse_never_push_out_the_last_good_checkpoint(
    store: Path, tmp_path: Path, save_every: int
) -> None:
    """The weights become worse in step 42, below the limit of a divergence. The checkpoint before it outlives any number of saves,
    kills and resumes: those after a resume compare with the healthy steps before it."""
    config = every_step(store, tmp_path, steps=100, save_every=save_every, keep=1)
    config = config.model_copy(update={"optim": config.optim.model_copy(update={"lr": 1e-9})})  # does not recover
    hook = Scale(42, 16.0, kill_after=47)
    trainer, _ = run_until(config, hook)
    assert 1.2 * hook.losses[40] < hook.losses[41] < 1.5 * math.log(VOCABULARY)
    good = 41 if save_every == 1 else 40
    assert good in saved_steps(trainer.run.path)
    for kill_after in (52, 70, 90):
        again, _ = run_until(config, Scale(0, 1.0, kill_after), resume="auto")
        assert again.position.step == kill_after
        assert good in saved_steps(again.run.path) and len(saved_steps(again.run.path)) <= 3
        marks = {
            step: ckpt.marks_of(ckpt.checkpoint_path(again.run.checkpoints, step))
            for step in saved_steps(again.run.path)
        }
        assert marks.pop(good) == ("", "") and any(doubt.startswith("spike") for _, doubt in marks.values())


def test_ruined_weights_are_saved_and_marked_only_while_there_is_nothing_better(store: Path, tmp_path: Path) -> None:
    """The first update ruins the weights, before any checkpoint."""
    saves = Saves()
    trainer = fitted(every_step(store, tmp_path, steps=8, save_every=3, keep=3), Rates({1: 50.0}), saves)
    assert [step for step, (trouble, _) in saves.marks.items() if trouble.startswith("diverged")] == [3, 6, 8]
    assert saved_steps(trainer.run.path) == [8]


def fit_with_rollback(config: Config) -> tuple[Any, list[Rollback], list[int], list[float]]:
    hook = Rates({7: 1e30})
    trainer = make_trainer(config, hook, MetricsHook())
    asked: list[int] = []
    usual = trainer.batches.numbered
    trainer.batches.numbered = lambda step, *rest: (asked.append(step), usual(step, *rest))[1]  # type: ignore[method-assign]
    trainer.start([])
    result = trainer.fit()
    assert asked == list(range(15)), "every step of data once, in order, those of later steps after the rollback"
    return (
        result.position,
        hook.rollbacks,
        saved_steps(trainer.run.path),
        [p.sum().item() for p in trainer.model.parameters()],
    )


@pytest.mark.slow
@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_a_rollback_skips_the_data_and_goes_on(store: Path, tmp_path: Path, tp: int) -> None:
    config = every_step(store, tmp_path, tp, on_spike="rollback", keep=2)
    outcomes = run_distributed(tp, fit_with_rollback, config)
    position, rollbacks, steps, weights = outcomes[0]
    assert [(each.step, each.from_step) for each in rollbacks] == [(6, 9)]
    assert (position.step, position.skipped, position.trouble) == (12, 3, "")
    assert (tmp_path / "checkpoints/superseded-step-00000007").is_dir(), "nothing resumes from the ruined weights"
    assert 12 in steps and all(math.isfinite(value) for value in weights)
    lines = [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl") if line["kind"] == "step"]
    assert lines == list(range(1, 13))
    state = json.loads((tmp_path / "checkpoints/step-00000012/state.json").read_text())
    assert state["skipped_steps"] == 3 and state["next_sample"] == 15 * config.train.global_batch
    assert ckpt.open_checkpoint(tmp_path / "checkpoints/step-00000012").position.skipped == 3


def test_rollbacks_that_do_not_help_end_the_run(store: Path, tmp_path: Path) -> None:
    class Always(Rates):
        def on_rollback(self, trainer: Trainer, event: Rollback) -> None:
            super().on_rollback(trainer, event)
            self.rates[7] = 1e30

    hook = Always({7: 1e30})
    with pytest.raises(TrainingError, match="3 rollbacks did not help; resume from '.*step-00000006'"):
        fitted(every_step(store, tmp_path / "run", on_spike="rollback", save_every=3), hook)
    assert len(hook.rollbacks) == 3
    with pytest.raises(TrainingError, match="but there is no proven checkpoint"):
        fitted(every_step(store, tmp_path / "none", on_spike="rollback", save_every=0), Rates({3: 1e30}))


@pytest.mark.parametrize(
    ("ruined", "keep", "keep_every", "protected", "gone"),
    [
        (set(), 2, 0, set(), [10, 20, 30, 40]),
        (set(), 2, 20, set(), [10, 30]),
        (set(), 1, 0, {30}, [10, 20, 40, 50]),
        ({40}, 2, 0, set(), [10, 20, 30, 40]),
        ({-40}, 2, 0, set(), [10, 20, 30, 40]),
        # In trouble: no unmarked one goes, and of the marked ones the newest of either kind stays.
        ({60}, 2, 0, set(), []),
        ({50, 60}, 1, 0, set(), [50]),
        ({30, 50, -60}, 1, 0, set(), [30]),
        ({-40, -50, 60}, 1, 0, set(), [40]),
        ({10, 20, 30, 40, 50, 60}, 1, 0, {20}, [10, 30, 40, 50]),
    ],
)
def test_what_is_rotated_away(
    tmp_path: Path, ruined: set[int], keep: int, keep_every: int, protected: set[int], gone: list[int]
) -> None:
    """`ruined`: negative numbers are in doubt."""
    made = [ckpt.checkpoint_path(tmp_path, step) for step in range(10, 70, 10)]
    for step, path in zip(range(10, 70, 10), made, strict=True):
        path.mkdir()
        marks = {"trouble": "diverged"} if step in ruined else {"doubt": "spike"} if -step in ruined else {}
        (path / "state.json").write_text(json.dumps(marks))
    assert [ckpt.step_of(path) for path in rotated(made, keep, keep_every, protected)] == gone


def test_checkpoints_by_the_clock(store: Path, tmp_path: Path) -> None:
    now: Iterator[float] = iter(range(0, 10_000, 20))
    config = every_step(store, tmp_path, save_every=0, save_minutes=1, keep=9, steps=9)
    trainer = make_trainer(config)
    hook = next(each for each in trainer.hooks if isinstance(each, PeriodicCheckpoint))
    hook._clock = lambda: next(now)
    trainer.start([])
    trainer.fit()
    assert len(saved_steps(trainer.run.path)) > 2 and saved_steps(trainer.run.path)[-1] == 9
    assert config.train.save_every == 0


def test_half_an_hour_is_the_default_everywhere() -> None:
    for name in presets():
        assert load(name, []).train.save_minutes == 30, name
