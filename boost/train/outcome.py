"""State of a run: current trouble, and the result."""

from dataclasses import dataclass
from pathlib import Path

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
