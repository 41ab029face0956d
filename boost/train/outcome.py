"""What a run has come to: its trouble while it lasts, and its result."""

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
    """Whether its weights are unusable: a checkpoint of them is marked, and only resumed from if given by its path."""


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
    """Why the run ended before its last step, evaluated and saved (early stopping); None if it did not."""


def early_stop(position: Position, train: TrainConfig) -> str | None:
    """Why early stopping ends a run at this position; None if it does not. A function of what a checkpoint holds, so that a
    resumed run decides the same, unless it has another patience."""
    stale, patience = position.stale_evaluations, train.early_stopping_patience
    if not patience or stale < patience or position.step >= train.steps:
        return None
    lowest = "never finite" if position.best_heldout_loss is None else f"lowest {position.best_heldout_loss:.4f}"
    return f"no improvement of the held-out loss in {stale} evaluations ({lowest})"
