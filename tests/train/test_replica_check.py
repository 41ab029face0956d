"""A diverging replica is detected within train.check_replicas_every steps and named; its weights are never saved."""

from pathlib import Path
from typing import Any

import pytest

from boost.config.optimizers import MuonConfig, OptimConfig
from boost.errors import TrainingError
from boost.train.loop import Trainer
from tests import toy
from tests.distributed import run_distributed
from tests.train.runs import Do, fitted, make_config, started


def run_with_flip(
    config: Any, step: int, rank: int, bit: int = 23, moment: str = ""
) -> tuple[str | None, int, list[str]]:
    """Flips an exponent bit of one weight, or of one of its `moment`, on one process after a step; by default the lowest, which
    keeps the loss finite. Returns (error, step at which the run ended, checkpoints)."""

    def flip(trainer: Trainer) -> None:
        held = [one[moment] for one in trainer.optimizer.moments.values() if moment in one]
        toy.flip(held[0] if moment else trainer.fused_params[2].tensor, 5, bit)

    trainer = started(config, Do("after_step", step, flip, rank))
    error = None
    try:
        trainer.fit()
    except TrainingError as raised:
        error = str(raised)
    return error, trainer.position.step, sorted(path.name for path in trainer.run.checkpoints.glob("step-*"))


def config_of(store: Path, run: Path, dp: int, **train: Any) -> Any:
    train = {"steps": 9, "micro_batch": 1, "global_batch": dp, "check_replicas_every": 4, **train}
    return make_config(store, run, dtype="float32", parallel={"dp": dp}, train=train)


@pytest.mark.slow
def test_one_flipped_bit_is_found_within_the_interval_and_its_process_named(store: Path, tmp_path: Path) -> None:
    for error, step, saved in run_distributed(3, run_with_flip, config_of(store, tmp_path, 3, save_every=3), 7, 1):
        assert error is not None and step == 8 and saved == ["step-00000003", "step-00000006"]
        assert "at step 8, process 1 (host " in error and "differ from those of 2 replicas that agree" in error
        assert f"resume from '{tmp_path / 'checkpoints' / 'step-00000006'}' with --resume auto" in error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optim", "moment"), [(OptimConfig(), ""), (OptimConfig(), "exp_avg_sq"), (MuonConfig(), "momentum_buffer")]
)
def test_a_flipped_bit_is_found_before_it_is_saved(
    store: Path, tmp_path: Path, optim: OptimConfig, moment: str
) -> None:
    """At the last step before a save, between two checks: if it is in a moment, the weights of the replicas are still equal."""
    config = config_of(store, tmp_path, 2, save_every=3, check_replicas_every=1000)
    config = config.model_copy(update={"optim": optim})
    for error, step, saved in run_distributed(2, run_with_flip, config, 3, 1, 23, moment):
        assert error is not None and step == 3 and saved == []


@pytest.mark.slow
def test_a_flip_that_ruins_the_loss_is_found_in_the_bad_step_that_it_makes(store: Path, tmp_path: Path) -> None:
    """The highest exponent bit, 200 steps before the next check; otherwise, the bad-step limit would blame the learning
    rate."""
    config = config_of(store, tmp_path, 3, check_replicas_every=200)
    for error, step, _ in run_distributed(3, run_with_flip, config, 2, 2, 30):
        assert error is not None and step == 3 and "process 2 (host " in error


@pytest.mark.slow
def test_of_two_replicas_both_are_named(store: Path, tmp_path: Path) -> None:
    for error, step, _ in run_distributed(2, run_with_flip, config_of(store, tmp_path, 2), 2, 1):
        assert error is not None and step == 4 and "there is no checkpoint: start over" in error
        assert "processes 0 (host " in error and ") and 1 (host " in error and "without a majority" in error


@pytest.mark.slow
def test_0_turns_the_check_off(store: Path, tmp_path: Path) -> None:
    for error, _, saved in run_distributed(
        2, run_with_flip, config_of(store, tmp_path, 2, check_replicas_every=0), 8, 0
    ):
        assert error is None and saved == ["step-00000009"]


def test_a_weight_that_no_gradient_touches_is_watched_too(store: Path, tmp_path: Path) -> None:
    """An embedding row of a token that does not occur in the text."""

    def poison(trainer: Trainer) -> None:
        trainer.fused_params[0].tensor.data[-1, 0] = float("nan")

    config = make_config(store, tmp_path, model={"vocab_size": 512}, train={"check_replicas_every": 4})
    with pytest.raises(TrainingError, match=r"weight 'embed' of process 0 \(host .*\) is not finite"):
        fitted(config, Do("after_step", 2, poison))
