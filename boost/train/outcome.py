"""State of a run: current trouble, early stopping, and the result."""

from dataclasses import dataclass
from pathlib import Path

from boost.config.schema import TrainConfig
from boost.train.checkpoint import Position
from boost.train.evaluate import Evaluation


@dataclass(frozen=True)
class RunTrouble:
    """What is currently wrong with a run."""

    text: str
    ruined: bool
    """Whether the last step shows that the weights are unusable (`Position.trouble`). If not, they may be fine (`doubt`)."""


@dataclass(frozen=True)
class TrainResult:
    """How a run ended."""

    position: Position
    evaluation: Evaluation | None
    """On the whole held-out split; None if a signal or a hook stopped the run."""
    checkpoint: Path | None
    """The latest complete checkpoint."""
    stopped_by: str | None = None
    """Name of the signal, or the hook's reason, that stopped the run before its last step."""
    by_signal: bool = False
    """Whether a signal to any process stopped it."""
    received_signal: bool = False
    """Whether this process received that signal."""
    early: str | None = None
    """Why early stopping ended the run, which is then evaluated and saved; None if it did not."""


def early_stop(position: Position, train: TrainConfig) -> str | None:
    """Why early stopping ends a run at this position; None if it does not. Depends only on what checkpoints store, so a resumed run
    makes the same decision, unless its patience differs."""
    stale, patience = position.stale_evaluations, train.early_stopping_patience
    if not patience or stale < patience or position.step >= train.steps:
        return None
    lowest = "never finite" if position.best_heldout_loss is None else f"lowest {position.best_heldout_loss:.4f}"
    return f"no improvement of the held-out loss in {stale} evaluations ({lowest})"
