"""Training: the step function, the position, and the loop that calls hooks around it. One process or a mesh: the same code.

A step is a pure function of (weights, optimizer state, step number): the data, the learning rate and everything else follow
from the step, so a resumed run repeats bit for bit what an uninterrupted one would have done.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from boost.config import Config
from boost.config.architecture import IGNORED, flops_per_token
from boost.data.batches import Batches
from boost.data.fit import open_fitting_store
from boost.data.store import TOKENIZER_FILE
from boost.errors import DamagedCheckpointError, TrainingError
from boost.models.fused import fused_params
from boost.optim.build import build_optimizer
from boost.optim.schedule import learning_rate
from boost.parallel.gradients import GradientReducer, StepFlags, StepStats, clip_gradients, reduce_step_stats
from boost.parallel.mesh import Mesh
from boost.train import checkpoint as ckpt
from boost.train.builtin_hooks import builtin_hooks
from boost.train.checkpoint import Position
from boost.train.evaluate import Evaluation, evaluate
from boost.train.hardware import memory_bytes, mfu, peak_flops
from boost.train.hooks import (
    BadStep,
    EvaluationEnd,
    Hook,
    HookRunner,
    SaveEnd,
    SaveStart,
    StepEnd,
    StepStart,
    TrainEnd,
    TrainStart,
)
from boost.train.metrics import EvalMetrics, StepMetrics
from boost.train.model import Model, backward, build_model, initialize_model
from boost.train.resume import check_resumable, check_start, data_identity
from boost.train.rundir import RunDirectory
from boost.train.signals import StopRequest

log = logging.getLogger("boost")


@dataclass(frozen=True)
class TrainResult:
    """How a run ended."""

    position: Position
    evaluation: Evaluation | None
    """On the whole held-out split; None if the run was stopped before its last step."""
    checkpoint: Path | None
    """The latest complete checkpoint."""
    stopped_by: str | None = None
    """Name of the signal, or reason of the hook, that stopped the run before its last step."""
    by_signal: bool = False
    """Whether a signal to any process stopped it."""
    received_signal: bool = False
    """Whether this process received that signal."""


class Trainer:
    """A run on this process: weights, optimizer, data, position, and the hooks around each step.

    `fit` trains to the end. `step`, `evaluate` and `save` also work on their own; all processes of the mesh must call them.
    """

    def __init__(self, config: Config, mesh: Mesh, run: RunDirectory, hooks: Sequence[Hook] = ()) -> None:
        """Builds everything at step 0. Raises DataError if the token store does not match the configuration."""
        self.config, self.mesh, self.run = config, mesh, run
        train = config.train
        self.store = open_fitting_store(config)
        self.heldout = self.store.split("heldout")
        self.batches = Batches(self.store.split("train"), train.seq_len, train.global_batch, train.seed)
        torch.manual_seed(train.seed + mesh.rank)
        self.model: Model = build_model(config, mesh)
        self.fused_params = list(fused_params(self.model))
        self.reducer = GradientReducer(self.fused_params, mesh)
        self.optimizer = build_optimizer(self.fused_params, config, mesh)
        self.flops_per_token = flops_per_token(config.model, train.seq_len)
        self.position = Position(0, 0)
        self.bad_steps = 0
        """Bad steps in a row up to the current position."""
        self.resumed_from: Path | None = None
        self.started_from: Path | None = None
        self.warnings: list[str] = []
        """Warnings from before the first step."""
        self.hooks = [hook for hook in (*hooks, *builtin_hooks(train)) if mesh.is_main or not hook.main_only]
        self._runner = HookRunner(self.hooks)
        self._signals = StopRequest()
        self._stop_reason: str | None = None
        self._save_requested = False
        self._saved: Path | None = None

    def start(self, resume_from: list[Path], start_from: str | None = None) -> None:
        """Loads the first intact checkpoint of `resume_from`; without one, starts at step 0 from the weights of `start_from`,
        or from initial ones.

        Raises CheckpointError if the checkpoint has another model or other data, or if all are damaged.
        """
        for path in resume_from:
            try:
                found = ckpt.open_checkpoint(path)
                check_resumable(found, self.config, self.store)
                self.position = ckpt.load_training_state(found, self.model, self.optimizer, self.mesh)
            except DamagedCheckpointError as error:
                if path == resume_from[-1]:
                    raise
                self.warnings.append(f"{error}; using the checkpoint before it")
                log.warning(self.warnings[-1])
            else:
                self.resumed_from = found.path
                log.info("resumed from %s at step %d", found.path, self.position.step)
                break
        else:
            self._load_initial_weights(start_from)
        ckpt.supersede(self.run.checkpoints, self.position.step, self.mesh)

    def _load_initial_weights(self, start_from: str | None) -> None:
        if start_from is None:
            initialize_model(self.model, self.config.train.seed, show=self.mesh.is_main)
            return
        found = check_start(start_from, self.config, self.store)
        ckpt.load_weights(found, self.model, self.mesh)
        self.started_from = found.path
        log.info("started from the weights of %s", found.path)

    def fit(self) -> TrainResult:
        """Trains from the current position to the last step and evaluates, or stops early on a signal or a hook's request.

        Hooks save: after the last step, where the run stops, and as often as the configuration says.
        """
        peak = peak_flops(
            self.mesh.device, getattr(torch, self.config.train.compute_dtype), self.config.run.peak_tflops
        )
        try:
            self._notify(Hook.setup)
            start = TrainStart(self.position.step, self.config.train.steps)
            self._notify(Hook.on_train_start, start)
            with StopRequest() as self._signals:
                stopped = self._train(peak)
                # Signals are still caught here: one that arrives now must not cost the results of a run that is saved already.
                end = TrainEnd(self._result(stopped, None if stopped else self.evaluate()))
                self._notify(Hook.on_train_end, end)
            return end.result
        finally:
            self._stop_reason, self._save_requested = None, False
            self._runner.teardown(self)

    def _train(self, peak: float) -> StepFlags:
        """Steps until the last one, or until any process asks to stop. Returns the flags that stopped the run, if any."""
        train = self.config.train
        while self.position.step < train.steps:
            lr = learning_rate(self.config.optim, self.position.step, train.steps)
            start = StepStart(self.position.step + 1, lr)
            self._notify(Hook.before_step, start)
            begin = time.perf_counter()
            stats = self.step(lr)
            metrics = self._step_metrics(stats, lr, time.perf_counter() - begin, peak)
            last = self.position.step == train.steps
            stop = stats.flags & (StepFlags.SIGNAL | StepFlags.STOP) if not last else StepFlags.NONE
            end = StepEnd(metrics, self.bad_steps > 0, last, bool(stop), StepFlags.SAVE in stats.flags)
            self._notify(Hook.after_step, end)
            if stop:
                return stop
        return StepFlags.NONE

    def step(self, lr: float) -> StepStats:
        """One optimizer step on one global batch. Updates nothing if any process saw a number that is not finite.

        Raises TrainingError after too many such steps in a row (`BadStepLimit`).
        """
        train, mesh = self.config.train, self.mesh
        tokens = train.global_batch * train.seq_len
        batches = list(self.batches.micro_batches(self.position.step, mesh.dp.rank, mesh.dp.size, train.micro_batch))
        self.reducer.begin(len(batches))
        loss = backward(self.model, batches, self.config, divisor=tokens)
        self.reducer.finish()
        targets = sum(int((batch.targets != IGNORED).sum()) for batch in batches)
        stats = reduce_step_stats(self.fused_params, loss, targets, tokens, mesh, self._take_flags())
        if math.isfinite(stats.loss) and math.isfinite(stats.gradient_norm):
            clip_gradients((s.tensor for s in self.fused_params), stats, self.config.optim.clip)
            self.optimizer.step(self.position.step, lr)
            self.bad_steps = 0
        else:
            self.bad_steps += 1
            event = BadStep(self.position.step + 1, stats.loss, stats.gradient_norm, self.bad_steps)
            self._notify(Hook.on_bad_step, event)
        self.position = Position(self.position.step + 1, self.position.tokens + tokens)
        return stats

    def _step_metrics(self, stats: StepStats, lr: float, seconds: float, peak: float) -> StepMetrics:
        speed = self.config.train.global_batch * self.config.train.seq_len / seconds
        return StepMetrics(
            step=self.position.step,
            loss=stats.loss,
            lr=lr,
            gradient_norm=stats.gradient_norm,
            tokens_per_second=speed,
            mfu=mfu(speed, self.flops_per_token, self.mesh.size, peak),
            memory_bytes=memory_bytes(self.mesh.device),
            tokens=self.position.tokens,
            seconds=seconds,
        )

    def evaluate(self, max_tokens: int | None = None) -> Evaluation:
        """Held-out loss at the current position, on the whole split or on about `max_tokens` of it. Collective."""
        self._runner.require_all_processes("evaluate", self.mesh.size)
        train, isolate = self.config.train, self.config.data.isolate_documents
        result = evaluate(self.model, self.heldout, train.seq_len, train.micro_batch, isolate, self.mesh, max_tokens)
        metrics = EvalMetrics(
            step=self.position.step,
            heldout_loss=result.loss,
            perplexity=result.perplexity,
            bits_per_byte=result.bits_per_byte,
            tokens=result.tokens,
        )
        event = EvaluationEnd(metrics, complete=max_tokens is None)
        self._notify(Hook.on_evaluation, event)
        return result

    def save(self) -> Path | None:
        """Writes a complete checkpoint of the current position; None if a hook refused it. Collective.

        Raises StorageError on every process if any of them could not write.
        """
        self._runner.require_all_processes("save", self.mesh.size)
        step = self.position.step
        if reason := self._refusal(SaveStart(step)):
            self.warn(f"checkpoint of step {step} not saved: {reason}")
            return None
        path = ckpt.save_checkpoint(
            self.run.checkpoints,
            self.model,
            self.optimizer,
            self.position,
            self.config,
            self.store.path / TOKENIZER_FILE,
            data_identity(self.store),
            self.mesh,
        )
        event = SaveEnd(step, path)
        self._notify(Hook.after_save, event)
        log.info("saved %s", path)
        self._saved = path
        return path

    def _refusal(self, event: SaveStart) -> str | None:
        """The first reason that a hook of any process has against a checkpoint, the same on all processes.

        Its own exchange, not the all-reduce of step statistics: saves are rare, and a hook may decide on the weights of now.
        """

        def ask_hooks() -> list[str]:
            reasons = self._notify(Hook.before_save, event)
            return [reason or "refused by a hook" for reason in reasons if reason is not None]

        return next((reasons[0] for reasons in ckpt.run_on_all(self.mesh, ask_hooks, TrainingError) if reasons), None)

    def request_stop(self, reason: str) -> None:
        """Asks all processes to save and stop, from any hook on any process (`boost.train.hooks` says when)."""
        self._stop_reason = self._stop_reason or reason

    def request_save(self) -> None:
        """Asks all processes for a checkpoint, from any hook on any process (`boost.train.hooks` says when)."""
        self._save_requested = True

    def warn(self, text: str) -> None:
        """Logs a warning and shows it to this process's hooks; the console prints it."""
        log.warning(text)
        self._notify(Hook.on_warning, text)

    def _take_flags(self) -> StepFlags:
        """What this process asks of all. A stop stays requested until the run ends, a save is requested once."""
        flags = StepFlags.NONE
        if self._signals.requested:
            flags |= StepFlags.SIGNAL
        if self._stop_reason is not None:
            flags |= StepFlags.STOP
        if self._save_requested:
            flags |= StepFlags.SAVE
        self._save_requested = False
        return flags

    def _result(self, stopped: StepFlags, evaluation: Evaluation | None) -> TrainResult:
        complete = ckpt.complete_checkpoints(self.run.checkpoints)
        latest = self._saved or (complete[-1] if complete else None)
        if not stopped:
            return TrainResult(self.position, evaluation, latest)
        # A signal prevails over a hook: it decides the exit code, and a scheduler waits for that.
        by_signal = StepFlags.SIGNAL in stopped
        name = self._signals.name or "a signal to another process"
        reason = name if by_signal else self._stop_reason or "a hook of another process"
        return TrainResult(self.position, None, latest, reason, by_signal, self._signals.requested)

    def _notify(self, method: Callable[..., Any], *arguments: Any) -> list[Any]:
        return self._runner.call(method, self, *arguments)
