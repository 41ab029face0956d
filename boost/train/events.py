"""Events of a run, as `Trainer` reports them to its hooks (`boost.train.hooks`), and what they carry."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:  # this module is imported before torch
    from boost.train.checkpoint import Position
    from boost.train.evaluate import Evaluation


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one optimizer step, across all processes."""

    step: int
    """Steps done, including this one."""
    loss: float
    """Mean loss over the targets in the step, in nats per token: cross-entropy, or the loss of a distillation."""
    lr: float
    """Learning rate of this step."""
    gradient_norm: float
    """Global gradient norm before clipping."""
    tokens_per_second: float
    """Throughput of all processes: tokens in the step / seconds."""
    mfu: float
    """Model FLOPs utilization as a fraction (formula: boost.train.hardware.mfu); nan if the peak is unknown."""
    memory_bytes: int
    """Memory of the main process in bytes: peak allocated on a GPU, resident set size on a CPU."""
    tokens: int
    """Tokens trained on since the start of the run."""
    seconds: float
    """Wall-clock time of the step."""
    cross_entropy: float | None = None
    """Mean cross-entropy in nats per token if the run distills and the loss has other terms, else None."""


@dataclass(frozen=True)
class EvalMetrics:
    """Metrics of one evaluation on held-out text."""

    step: int
    """Steps done so far."""
    heldout_loss: float
    """Mean cross-entropy in nats per token."""
    perplexity: float
    """exp(heldout_loss)."""
    bits_per_byte: float
    """Cross-entropy in bits per byte of text; comparable across tokenizers."""
    tokens: int
    """Held-out tokens evaluated."""
    final: bool = False
    """Whether it is the final evaluation of the run, on the whole held-out split."""
    heldout_losses: Mapping[str, float] = field(default_factory=dict)
    """Mean cross-entropy of each store in data.mixture by name, in nats per token; `heldout_loss` is their weighted mean. Empty
    without a mixture."""


@dataclass(frozen=True)
class StepStart:
    """A step is about to run."""

    step: int
    """Number of the step, starting at 1."""
    lr: float


@dataclass(frozen=True)
class BadStep:
    """A step with a non-finite loss or gradient norm. It changed no weights."""

    step: int
    loss: float
    gradient_norm: float
    consecutive: int
    """Bad steps in a row, including this one."""


@dataclass(frozen=True)
class StepEnd:
    """A step is done."""

    metrics: StepMetrics
    skipped: bool
    """Whether the step was bad and changed no weights."""
    last: bool
    """Whether this was the last step of the run."""
    stopping: bool
    """Whether the run stops here, before its last step, because a signal or a hook requested it."""
    save_requested: bool
    """Whether a hook on any process, or SIGUSR2 to any process, requested a checkpoint at this step."""
    empty: bool = False
    """Whether no token of the global batch counts toward the loss. The loss is then 0 and no weights change."""
    joins: bool = False
    """Whether replicas wait to join the run (docs/recovery.md)."""


@dataclass(frozen=True)
class SaveStart:
    """A checkpoint is about to be written."""

    step: int
    last: bool = False
    """Whether this is the last checkpoint of the run."""


@dataclass(frozen=True)
class SaveEnd:
    """A checkpoint is complete."""

    step: int
    """The step that was saved; a background save completes some steps later."""
    path: Path


@dataclass(frozen=True)
class Rollback:
    """The run was rolled back to an earlier checkpoint."""

    step: int
    """Steps done, as of the checkpoint."""
    from_step: int
    """Steps done before the rollback."""
    reason: str


@dataclass(frozen=True)
class RunEvent:
    """Any other event in the run, defined by a subclass. Each event becomes a line on the console and in metrics.jsonl."""

    kind: ClassVar[str]
    """`kind` of its line in metrics.jsonl."""
    step: int
    """The step in progress, or the next one."""

    def line(self) -> str:
        """The event as one line for the console."""
        raise NotImplementedError

    def numbers(self) -> dict[str, float]:
        """Numbers for TensorBoard, by name."""
        return {}


@dataclass(frozen=True)
class EvaluationEnd:
    """An evaluation is done. The result is the same on all processes."""

    metrics: EvalMetrics
    complete: bool
    """Whether it covers the whole held-out split, not just a part."""


@dataclass(frozen=True)
class SampleEnd:
    """Text was generated (train.sample_tokens)."""

    step: int
    """Steps done so far."""
    prompt: str
    text: str
    """Continuation of the prompt by the model."""


@dataclass(frozen=True)
class RunTrouble:
    """A problem that a run currently has."""

    text: str
    ruined: bool
    """Whether the last step shows that the weights are unusable (`Position.trouble`). Otherwise they may be fine (`doubt`)."""


@dataclass(frozen=True)
class TrainResult:
    """How a run ended."""

    position: "Position"
    evaluation: "Evaluation | None"
    """Evaluation of the whole held-out split; None if a signal or a hook stopped the run."""
    checkpoint: Path | None
    """The latest complete checkpoint."""
    stopped_by: str | None = None
    """The signal's name or the hook's reason, if either stopped the run before its last step."""
    by_signal: bool = False
    """Whether a signal to any process stopped the run."""
    received_signal: bool = False
    """Whether this process received that signal."""

    @property
    def stopped(self) -> bool:
        """Whether a signal or a hook stopped the run before its last step."""
        return self.stopped_by is not None


class AnyHook(Protocol):
    """What `Trainer` knows of a hook (`boost.train.hooks`), in addition to a method for each event."""

    main_only: ClassVar[bool]
