"""What a run has come to: its trouble while it lasts, and its result."""

from dataclasses import dataclass
from pathlib import Path

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
    """On the whole held-out split; None if the run was stopped before its last step."""
    checkpoint: Path | None
    """The latest complete checkpoint."""
    stopped_by: str | None = None
    """Name of the signal, or the hook's reason, that stopped the run before its last step."""
    by_signal: bool = False
    """Whether a signal to any process stopped it."""
    received_signal: bool = False
    """Whether this process received that signal."""
