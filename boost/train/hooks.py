"""Hooks: code that runs around training steps.

A hook is a class with one method per event. Subclass `Hook`, override what you need, and pass it to the trainer:

    class StopAtLoss(Hook):
        def after_step(self, trainer, event):
            if event.metrics.loss < 2.0:
                trainer.request_stop("loss below 2.0")

    Trainer(config, mesh, run, hooks=[StopAtLoss()]).fit()

**Order of events.** `Trainer.fit` calls `setup` and `on_train_start`. For each step, it calls `before_step`, `after_backward`,
`on_bad_step` (only if the loss or gradient norm is not finite; no weight changed) and `after_step`. At the end, it calls
`on_train_end` and `teardown`. `Trainer.save` calls `before_save` and, once the checkpoint is complete, `after_save`. With
train.async_save, that happens in a later step, before its `after_step`. `Trainer.evaluate` calls `on_evaluation` (unless a
signal ended it early), then `on_sample` for each prompt (train.sample_tokens). `save` and `evaluate` may be called from anywhere.

A rollback (train.on_spike) follows `after_step` and calls `on_rollback`.

**On GPUs**, `fit` launches the passes of step n + 1 before it reads the statistics of step n, so the GPU never waits for
the host. `before_step` and `after_backward` for step n + 1 come before `on_bad_step`, `after_step` and all later events
for step n. The update in step n + 1 follows all of these. Evaluations, saves and rollbacks at step n therefore see the
same weights, optimizer state and position as on CPUs; only the gradients are already those of step n + 1. Exceptions:

- If the run stops or rolls back in `after_step`, the passes of step n + 1 are discarded, although hooks have seen their events.
- If a hook changes weights in `after_step`, the passes of step n + 1 are repeated, with both events. The hook must change weights
  in place and on all processes.
- If a hook changes weights in `before_step` of step n + 1, evaluations and checkpoints at step n include the change.
- If the passes of step n + 1 fail, hooks do not see the end of step n.

Optimizers that need the statistics on the host (`Optimizer.takes_tensors` is False) use the CPU order on GPUs, too.

**Order of hooks.** For each event, the hooks passed to the trainer run first, in order. The built-in hooks follow: `BadStepLimit`,
`ReplicaCheck`, `HealthMonitor`, `PeriodicEvaluation`, `PeriodicCheckpoint`, `TextSamples`, `ProfileHook`. Hooks passed to the
trainer therefore see a step before it is evaluated and saved.

**Processes.** Hooks run on every process; those with `main_only = True` run on the main process only. Hooks on all processes may
call the collective methods `trainer.save` and `trainer.evaluate`, as long as all processes do so at the same event. If there are
several processes, a main-only hook that calls them raises RuntimeError.

**Requests.** Any hook on any subset of processes may call `trainer.request_stop(reason)` and `trainer.request_save()`. Requests are
reduced with the step statistics. A request from `before_step` or `after_backward` takes effect after the same step. A
request from any other event takes effect after the next step, also on GPUs, because the statistics of step n + 1 are
reduced after `after_step` of step n. `before_save` may refuse a checkpoint by returning a reason. If it refuses on any
process, all processes skip the checkpoint, even the run's last one.

**Errors.** A hook that raises ends the run: later hooks do not see the event, and `teardown` is called without `on_train_end`.
The launcher then ends the other processes, as after any error. An error in `before_save` is raised on all processes (as a
TrainingError on the others) before anything is written. An error in `teardown` is only logged, because the run is over.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:  # this module is imported before torch
    from boost.config import Config
    from boost.data.batches import Batches
    from boost.data.fit import Corpus
    from boost.data.store import TokenStore
    from boost.models.fused import FusedParam
    from boost.optim.adamw import Optimizer
    from boost.parallel.mesh import Mesh
    from boost.train.checkpoint import Position
    from boost.train.evaluate import Evaluation
    from boost.train.model import Model
    from boost.train.rundir import RunDirectory
    from boost.train.saves import Saves

log = logging.getLogger("boost")


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
class TrainStart:
    """Training is about to start or resume."""

    step: int
    """Steps already done: 0 for a new run."""
    total_steps: int


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


@dataclass(frozen=True)
class TrainEnd:
    """Training is over: finished with the final evaluation, or stopped and saved."""

    result: TrainResult


class Training(Protocol):
    """The interface that a run offers to its hooks; `Trainer` implements it."""

    config: "Config"
    mesh: "Mesh"
    run: "RunDirectory"
    model: "Model"
    optimizer: "Optimizer"
    corpus: "Corpus"
    store: "TokenStore"
    """The first store of the corpus; the run uses its tokenizer."""
    batches: "Batches"
    flops_per_token: int
    fused_params: "list[FusedParam]"
    position: "Position"
    """Steps and tokens so far."""
    saves: "Saves"
    """The run's checkpoints."""
    bad_steps: int
    """Consecutive bad steps up to the current position."""
    trouble: RunTrouble | None
    """The run's current problem, as set by `HealthMonitor`."""
    proven_step: int
    """The last step whose weights the next step's loss proved healthy, with no trouble since."""
    resumed_from: Path | None
    started_from: Path | None
    warnings: list[str]
    """Warnings from before the first step."""
    recent: list[StepMetrics | EvalMetrics]
    """Metrics of the latest step."""
    takes_over: bool
    """Whether this process becomes the main process of a run in progress."""

    @property
    def at_end(self) -> bool:
        """Whether no step is left."""

    @property
    def rolling_back(self) -> bool:
        """Whether a rollback follows this step."""

    def evaluate(self, max_tokens: int | None = None) -> "Evaluation | None":
        """Evaluates the held-out loss. Collective."""

    def save(self, wait: bool = True) -> Path | None:
        """Saves a checkpoint of the current position. Collective."""

    def save_last(self, urgent: bool) -> Path | None:
        """Saves the run's last checkpoint, with retries. Collective."""

    def check_replicas(self, again: bool = False) -> None:
        """Compares the weights and moments of all replicas. Collective."""

    def request_rollback(self, reason: str) -> None:
        """Requests a rollback after this step. Call it on all processes, in `after_step`."""

    def request_stop(self, reason: str) -> None:
        """Requests that all processes save and stop."""

    def request_save(self) -> None:
        """Requests a checkpoint."""

    def warn(self, text: str) -> None:
        """Logs a warning and passes it to this process's hooks."""

    def notify(self, method: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Calls `method` (an attribute of `Hook`) on each of this process's hooks."""


class Hook:
    """Base class of all hooks. Every method does nothing by default. See the module docstring for the order of events."""

    main_only: ClassVar[bool] = False
    """Whether the hook runs on the main process only."""

    def setup(self, trainer: "Training") -> None:
        """Acquires resources such as files and connections. Called before any hook gets `on_train_start`."""

    def on_train_start(self, trainer: "Training", event: TrainStart) -> None:
        """Called once before the first step."""

    def before_step(self, trainer: "Training", event: StepStart) -> None:
        """Called before each step."""

    def after_backward(self, trainer: "Training") -> None:
        """Called in each step after gradients are reduced, before their norm is computed and they are clipped and applied."""

    def on_bad_step(self, trainer: "Training", event: BadStep) -> None:
        """Called before `after_step` for a step with a non-finite loss or gradient norm, on all processes.

        `trainer.position` is already the position after the step.
        """

    def after_step(self, trainer: "Training", event: StepEnd) -> None:
        """Called after each step, including bad steps."""

    def before_save(self, trainer: "Training", event: SaveStart) -> str | None:
        """Called before a checkpoint is written. Return a reason to refuse it, None to allow it."""
        return None

    def after_save(self, trainer: "Training", event: SaveEnd) -> None:
        """Called after a checkpoint is complete."""

    def on_event(self, trainer: "Training", event: RunEvent) -> None:
        """Called for any other event at any point in the run, such as the loss or return of a replica."""

    def state(self) -> dict[str, Any]:
        """State of the hook as JSON-serializable values, which a process that joins the run loads. Empty by default."""
        return {}

    def take_state(self, state: dict[str, Any]) -> None:
        """Loads the `state` that the same hook had on another process."""

    def on_rollback(self, trainer: "Training", event: Rollback) -> None:
        """Called after a rollback has loaded the weights, optimizer state and position of an earlier checkpoint."""

    def on_evaluation(self, trainer: "Training", event: EvaluationEnd) -> None:
        """Called after each evaluation."""

    def on_sample(self, trainer: "Training", event: SampleEnd) -> None:
        """Called for each text sample, after an evaluation (train.sample_tokens)."""

    def on_warning(self, trainer: "Training", text: str) -> None:
        """Called for each `trainer.warn(text)` on this process."""

    def on_train_end(self, trainer: "Training", event: TrainEnd) -> None:
        """Called once at the end of the run, unless it failed."""

    def teardown(self, trainer: "Training") -> None:
        """Releases resources. Always called at the end of the run, even if `setup` was not called."""


class HookRunner:
    """Calls one process's hooks in order and tracks whether a main-only hook is running."""

    def __init__(self, hooks: list[Hook]) -> None:
        self._hooks = hooks
        self._main_only_hook: Hook | None = None

    def call(self, method: Callable[..., Any], trainer: "Training", *arguments: Any) -> list[Any]:
        """Calls `method` (an attribute of `Hook`) on every hook. Returns their results."""
        results = []
        for hook in list(self._hooks):  # a copy: `add` may add hooks during the loop
            with self._running(hook):
                results.append(getattr(hook, method.__name__)(trainer, *arguments))
        return results

    def add(self, trainer: "Training", hooks: Sequence[Hook], start: TrainStart) -> None:
        """Sets up hooks for a run in progress and adds them before all others."""
        for hook in hooks:
            with self._running(hook):
                hook.setup(trainer)
                hook.on_train_start(trainer, start)
        self._hooks[:0] = hooks

    def teardown(self, trainer: "Training") -> None:
        """Tears down every hook, even if one fails. Errors are only logged, because the outcome of the run is already decided."""
        for hook in self._hooks:
            try:
                with self._running(hook):
                    hook.teardown(trainer)
            except Exception:
                log.exception("teardown of %s failed", type(hook).__name__)

    def require_all_processes(self, method: str, world_size: int) -> None:
        """Raises RuntimeError in a main-only hook, because a collective method would wait forever for the other processes."""
        if self._main_only_hook is not None and world_size > 1:
            raise RuntimeError(
                f"{type(self._main_only_hook).__name__} runs on the main process only, but Trainer.{method} needs all processes; "
                "set main_only = False, or call request_save() for a checkpoint"
            )

    @contextlib.contextmanager
    def _running(self, hook: Hook) -> Iterator[None]:
        outer = self._main_only_hook
        self._main_only_hook = hook if hook.main_only else outer
        try:
            yield
        finally:
            self._main_only_hook = outer
