"""Training: the position, and the loop that calls hooks around each step, on one process or a mesh.

A step is a pure function of (weights, optimizer state, step number): the data, the learning rate and everything else follow
from the step, so a resumed run is bitwise identical to an uninterrupted one.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from boost.config import Config
from boost.config.architecture import flops_per_token
from boost.data.batches import Batches
from boost.data.fit import open_fitting_store
from boost.errors import NonFiniteError, StorageError, TrainingError
from boost.models.fused import fused_params
from boost.optim.build import build_optimizer
from boost.optim.schedule import learning_rate
from boost.parallel.gradients import GradientReducer, StepFlags, StepStats, reduce_flags
from boost.parallel.mesh import Mesh
from boost.parallel.replicas import check_replicas
from boost.parallel.sharding import forget_gathered
from boost.train import checkpoint as ckpt
from boost.train.begin import begin
from boost.train.builtin_hooks import builtin_hooks
from boost.train.checkpoint import Checkpoint, Position, SavedCheckpoint
from boost.train.evaluate import Evaluation, EvaluationStopped, evaluate
from boost.train.hardware import peak_flops
from boost.train.heartbeat import Phase, enter, in_phase
from boost.train.hooks import (
    BadStep,
    EvaluationEnd,
    Hook,
    HookRunner,
    MembershipChange,
    SaveEnd,
    SaveStart,
    StepEnd,
    StepStart,
    TrainEnd,
    TrainStart,
)
from boost.train.metrics import EvalMetrics, StepMetrics, step_metrics
from boost.train.model import Model, build_model
from boost.train.outcome import RunTrouble, TrainResult, early_stop
from boost.train.recoverable_step import stepper_of
from boost.train.recovery import Recovery
from boost.train.replica_check import require_sound
from boost.train.resume import data_identity
from boost.train.rollback import Rollbacks
from boost.train.rundir import RunDirectory
from boost.train.signals import StopRequest
from boost.train.step import Passes, StepClock, Update

log = logging.getLogger("boost")

SLOW_SAVE_S = 1.0
"""Wait for the previous background save above which a warning is logged."""
LAST_SAVE_S = 60.0
"""How long a run that fails waits for a background save to finish."""


class Trainer:
    """A run on this process: weights, optimizer, data, position, and the hooks around each step.

    `fit` trains to the end. `step`, `evaluate` and `save` can also be called directly, by all processes of the mesh.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        run: RunDirectory,
        hooks: Sequence[Hook] = (),
        ahead: bool | None = None,
        recovery: Recovery | None = None,
    ) -> None:
        """Builds everything at step 0. Raises DataError if the token store does not match the configuration.

        `ahead`: whether `fit` launches the passes of a step before it reads the numbers of the one before; None: on GPUs. Never for
        optimizers that read numbers in their step (`Optimizer.takes_tensors`). `recovery`: of a run with in-step recovery.
        """
        self.config, self.mesh, self.run, self.recovery = config, mesh, run, recovery
        train = config.train
        self.store = open_fitting_store(config)
        self.heldout = self.store.split("heldout")
        self.batches = Batches(self.store.split("train"), train.seq_len, train.global_batch, train.seed)
        torch.manual_seed(train.seed + mesh.rank)
        self.model: Model = build_model(config, mesh)
        self.fused_params = list(fused_params(self.model))
        sums = getattr(torch, train.sum_dtype)
        self.reducer = GradientReducer(self.fused_params, mesh, sums, keeps=recovery is not None)
        self.optimizer = build_optimizer(self.fused_params, config, mesh)
        parts = self.model, self.fused_params, self.reducer, self.optimizer, self.batches
        self._stepper = stepper_of(recovery)(config, mesh, *parts, ahead)
        self.flops_per_token = flops_per_token(config.model, train.seq_len)
        self.position = Position(0, 0)
        self.bad_steps = 0
        """Consecutive bad steps up to the current position."""
        self.resumed_from: Path | None = None
        self.started_from: Path | None = None
        self.warnings: list[str] = []
        """Warnings from before the first step."""
        every = (*hooks, *builtin_hooks(config))
        self.hooks = [hook for hook in every if mesh.is_main or not hook.main_only]
        self._for_main = [hook for hook in every if hook not in self.hooks]
        self.recent: list[StepMetrics | EvalMetrics] = []
        """Of the latest step: a process that becomes the main one writes them if the one before did not."""
        self.abandoned_save: int | None = None
        """The step of a save that the latest change of the membership interrupted."""
        self._runner, self._is_fitting, self._early = HookRunner(self.hooks), False, list[MembershipChange]()
        self._signals = StopRequest()
        self._stop_reason: str | None = None
        self._save_requested = False
        self._saved: Path | None = None
        self._signals_to_reduce = False
        """Whether a stop signal may have arrived outside of a step: in start-up, an evaluation or a save."""
        self._checked: Position | None = None
        """Position of the last successful replica check."""
        self.trouble: RunTrouble | None = None
        """What is currently wrong with the run (`boost.train.health`)."""
        self.proven_step = -1
        """The last step whose weights were proven healthy by the loss of the next step, without trouble since."""
        self._rollback: str | None = None
        self.rollbacks = Rollbacks()
        # Read once: the store on disk may be replaced or deleted while the run trains.
        tokenizer, data = self.store.tokenizer_json.encode(), data_identity(self.store)
        self._saver = ckpt.CheckpointSaver(self.model, self.optimizer, config, tokenizer, data, mesh)

    def start(self, resume_from: list[Path], start_from: str | None = None) -> None:
        """Loads the first intact checkpoint of `resume_from`; without one, starts at step 0 from the weights of `start_from`
        or from initial weights.

        Raises CheckpointError if the checkpoint has another model or other data, or if all are damaged.
        """
        begin(self, resume_from, start_from)

    def add_data(self, data: dict[str, Any]) -> None:
        """Adds to what the checkpoints of this run record of their data."""
        self._saver.add_data(data)

    def load(self, found: Checkpoint) -> None:
        """Loads weights, optimizer state, RNG states and position of a checkpoint. Collective. Raises CheckpointError."""
        position = ckpt.load_training_state(found, self.model, self.optimizer, self.mesh)
        forget_gathered(self.model)
        self.position = replace(position, trouble="")

    @property
    def checkpoint_folders(self) -> list[Path]:
        """Folders of this run's checkpoints: its own, and the one in run.fallback_dir if configured."""
        fallback = ckpt.fallback_folder(self.config)
        return [self.run.checkpoints, *([fallback] if fallback else [])]

    @property
    def at_end(self) -> bool:
        """Whether training is over: after the last step, or because of early stopping. The same on all processes."""
        train = self.config.train
        return self.position.step >= train.steps or early_stop(self.position, train) is not None

    def fit(self) -> TrainResult:
        """Trains from the current position to the end and evaluates, or stops before on a signal or a hook's request.

        Hooks save: after the last step, when the run stops, and periodically.
        """
        dtype = getattr(torch, self.config.train.compute_dtype)
        peak = peak_flops(self.mesh.device, dtype, self.config.run.peak_tflops)
        try:
            self.notify(Hook.setup)
            self.notify(Hook.on_train_start, TrainStart(self.position.step, self.config.train.steps))
            self._is_fitting = True
            for event in self._early:
                self.notify(Hook.on_membership, event)
            with StopRequest() as self._signals:
                stopped = self._train(peak)
                # Signals are still caught here: one that arrives now must not discard the results of a run that is saved.
                self.finish_save()
                evaluation = None if stopped else self.evaluate()
                if not stopped and evaluation is None:
                    stopped = StepFlags.SIGNAL
                end = TrainEnd(self._result(stopped, evaluation))
                self.notify(Hook.on_train_end, end)
            return end.result
        finally:
            self._stop_reason, self._save_requested = None, False
            self._stepper.prefetcher.close()
            self._saver.close(LAST_SAVE_S)
            self._runner.teardown(self)

    def _train(self, peak: float) -> StepFlags:
        """Steps until the end, or until any process asks to stop. Returns the flags that stopped the run, if any."""
        train, stepper, clock = self.config.train, self._stepper, StepClock(self._stepper.timed_on)
        self._signals_to_reduce = True
        passes: Passes | None = None
        while not self.at_end:
            if self._signals_to_reduce and self._signal_anywhere():
                self.finish_save()  # the save in flight may be of this position
                if not self._is_saved():
                    self.save_last(urgent=True)
                return StepFlags.SIGNAL
            if passes is None or not stepper.is_current(passes, self.position):
                passes = self._begin_step(clock)
            clock.resume()
            update = self._update(passes)
            last = self.position.step == train.steps
            passes = self._begin_step(clock) if stepper.ahead and not last else None
            stats = self._read(update)
            seconds = clock.seconds(update)
            clock.pause()
            if self._saver.in_flight is not None and self.mesh.together(self._saver.done_everywhere):
                self.finish_save()
            metrics = step_metrics(self, stats, update.lr, seconds, peak)
            self.recent = [metrics]
            stop = stats.flags & (StepFlags.SIGNAL | StepFlags.STOP) if not last else StepFlags.NONE
            end = StepEnd(metrics, self.bad_steps > 0, last, bool(stop), StepFlags.SAVE in stats.flags)
            self.notify(Hook.after_step, end)
            if stop:
                return stop
            if self._rollback:
                reason, self._rollback = self._rollback, None
                self.rollbacks.roll_back(self, reason)
            if StepFlags.JOIN in stats.flags and not self.at_end and self.recovery is not None:
                self.recovery.admit()
                self._signals_to_reduce = True  # as on those that came in
        return StepFlags.NONE

    def _begin_step(self, clock: StepClock) -> Passes:
        """Launches the passes of the next step."""
        step = self.position.step
        enter(Phase.STEP, step + 1)
        lr = learning_rate(self.config.optim, step, self.config.train.steps)
        start = StepStart(step + 1, lr)
        self.notify(Hook.before_step, start)
        clock.resume()
        return self._passes(lr)

    def step(self, lr: float) -> StepStats:
        """One optimizer step on one global batch. Updates nothing if the loss or the gradient norm is not finite.

        Raises TrainingError after too many consecutive such steps (`BadStepLimit`).
        """
        return self._read(self._update(self._passes(lr)))

    def _passes(self, lr: float) -> Passes:
        passes = self._stepper.passes(self.position, lr)
        self.notify(Hook.after_backward)
        return passes

    def _update(self, passes: Passes) -> Update:
        """Launches the update of a step; the position is then behind it."""
        update = self._stepper.update(passes, self._take_flags())
        step, tokens = self.position.step + 1, self.position.tokens + self._stepper.tokens
        self.position = replace(self.position, step=step, tokens=tokens)
        return update

    def _read(self, update: Update) -> StepStats:
        """The numbers of the step that leads to the current position."""
        stats = self._stepper.read(update)
        if stats.is_finite:
            self.bad_steps = 0
        else:
            self.bad_steps += 1
            event = BadStep(self.position.step, stats.loss, stats.gradient_norm, self.bad_steps)
            self.notify(Hook.on_bad_step, event)
        return stats

    def evaluate(self, max_tokens: int | None = None) -> Evaluation | None:
        """Held-out loss at the current position, on the whole split or on about `max_tokens` of it; None if a stop signal to
        any process interrupted it. Collective.
        """
        self._runner.require_all_processes("evaluate", self.mesh.size)
        train, isolate = self.config.train, self.config.data.isolate_documents
        sizes = (train.seq_len, train.micro_batch, isolate, self.mesh, max_tokens)
        try:
            with in_phase(Phase.EVALUATION):
                sizes_and_stop = (*sizes, self._signal_now)
                result = self.mesh.together(lambda: evaluate(self.model, self.heldout, *sizes_and_stop))
        except EvaluationStopped:
            return None
        finally:
            self._signals_to_reduce = True
        losses = result.loss, result.perplexity, result.bits_per_byte
        metrics = EvalMetrics(self.position.step, *losses, result.tokens, final=self.at_end and max_tokens is None)
        self.recent.append(metrics)
        event = EvaluationEnd(metrics, complete=max_tokens is None)
        self.notify(Hook.on_evaluation, event)
        return result

    def prepare_saves(self) -> None:
        """Allocates the host memory of background saves, so that the first one does not have to. Collective."""
        if self.recovery is None:  # whose first save does it: replicas that come back start at other times
            self._saver.prepare()

    def save(self, wait: bool = True) -> Path | None:
        """Saves a checkpoint of the current position; None if a hook refused it. Collective.

        With `wait` the checkpoint is complete when this returns. Otherwise it is a background save: this returns None after the
        copy to host memory, hooks get `after_save` once the checkpoint is complete, and a failure is a warning. Only one save
        is in flight; the next one waits for it.

        Raises StorageError on every process if any of them could not write, NonFiniteError if weights or optimizer state
        have a non-finite value, TrainingError if replicas differ, because a checkpoint stores the weights of one of them.
        """
        if not self._may_save():
            return None
        with in_phase(Phase.SAVE):
            if not wait:
                self.mesh.together(lambda: self._saver.start(self.run.checkpoints, self._saved_position()))
                return None
        return self._announce(self._save_into(self.run.checkpoints))

    def save_last(self, urgent: bool) -> Path | None:
        """Saves the last checkpoint of a run: `save` with retries (run.save_retry_minutes) and run.fallback_dir. Collective.

        `urgent`: a signal stops the run, so run.fallback_dir is tried before the retries.
        """
        if not self._may_save(last=True):
            return None
        saved = ckpt.save_with_retries(
            self._save_into,
            self.run.checkpoints,
            ckpt.fallback_folder(self.config),
            self.config.run.save_retry_minutes,
            urgent,
            self.warn,
        )
        return self._announce(saved)

    def _save_into(self, folder: Path) -> SavedCheckpoint:
        with in_phase(Phase.SAVE):
            saved: SavedCheckpoint = self.mesh.together(lambda: self._saver.save(folder, self._saved_position()))
            return saved

    def finish_save(self) -> None:
        """Waits for the save in flight, if any; its failure is a warning. Collective."""
        if self._saver.in_flight is None:
            return
        try:
            with in_phase(Phase.SAVE):
                saved = self.mesh.together(lambda: self._saver.finish() if self._saver.in_flight is not None else None)
            if saved is not None:
                self._announce(saved)
        except (StorageError, NonFiniteError) as error:
            self.warn(f"{error}; training continues, earlier checkpoints are intact")

    def _saved_position(self) -> Position:
        ruined = self.trouble is not None and self.trouble.ruined
        return replace(self.position, trouble=self.trouble.text if self.trouble and ruined else "")

    def _may_save(self, last: bool = False) -> bool:
        """Waits for the save in flight; returns whether a new one may begin, that is, no hook refuses it."""
        self._runner.require_all_processes("save", self.mesh.size)
        self._signals_to_reduce = True
        in_flight, begin = self._saver.in_flight, time.perf_counter()
        self.finish_save()
        if in_flight is not None and (waited := time.perf_counter() - begin) > SLOW_SAVE_S:
            self.warn(
                f"training waited {waited:.1f} s for the checkpoint of step {in_flight}, which was still being written; save less "
                "often or write to a faster disk"
            )
        self.check_replicas()
        step = self.position.step
        if reason := self._refusal(SaveStart(step, last)):
            self.warn(f"checkpoint of step {step} not saved: {reason}")
            return False
        return True

    def _announce(self, saved: SavedCheckpoint) -> Path:
        """Notifies hooks of a complete checkpoint, and logs it."""
        for warning in saved.warnings:
            self.warn(warning)
        event = SaveEnd(saved.step, saved.path)
        self._saved = saved.path
        log.info("saved %s", saved.path)
        self.notify(Hook.after_save, event)
        return saved.path

    def check_replicas(self, again: bool = False) -> None:
        """Compares the weights of all replicas, once per position unless `again`, and never if train.check_replicas_every is 0.
        Collective.

        Raises TrainingError on every process, naming the processes that differ or have a non-finite weight.
        """
        self._runner.require_all_processes("check_replicas", self.mesh.size)
        if not self.config.train.check_replicas_every or (self._checked == self.position and not again):
            return
        report = self.mesh.together(lambda: check_replicas(self.fused_params, self.mesh))
        if report.mismatches or report.not_finite:
            self.finish_save()  # the checkpoint to resume from may still be in flight
        complete = ckpt.complete_checkpoints(self.run.checkpoints)
        require_sound(report, self.position.step, complete[-1] if complete else None)
        self._checked = self.position

    def _refusal(self, event: SaveStart) -> str | None:
        """The first reason of a hook on any process to refuse a checkpoint, the same on all processes.

        A separate exchange, not part of the step statistics: saves are rare, and a hook may inspect the current weights.
        """

        def ask_hooks() -> list[str]:
            reasons = self.notify(Hook.before_save, event)
            return [reason or "refused by a hook" for reason in reasons if reason is not None]

        return next((reasons[0] for reasons in ckpt.run_on_all(self.mesh, ask_hooks, TrainingError) if reasons), None)

    def begin_trouble(self, text: str, ruined: bool) -> None:
        """Marks the run as in trouble; `ruined`: the last step indicates that its weights are ruined."""
        self.trouble = RunTrouble(text, ruined)

    def end_trouble(self) -> None:
        """The run is healthy again."""
        self.trouble = None

    def proven_checkpoint(self) -> Path | None:
        """The newest checkpoint whose weights a later healthy step has proven healthy; None if there is none."""
        found = [path for folder in self.checkpoint_folders for path in ckpt.complete_checkpoints(folder)]
        steps = sorted(((ckpt.step_of(path) or 0, path) for path in found), reverse=True)
        return next((path for step, path in steps if step <= self.proven_step and not ckpt.trouble_of(path)), None)

    def request_rollback(self, reason: str) -> None:
        """Requests a rollback to the newest proven checkpoint after this step. To be called on all processes, in `after_step`."""
        self._rollback = reason

    @property
    def rolling_back(self) -> bool:
        """Whether a rollback follows this step."""
        return self._rollback is not None

    def request_stop(self, reason: str) -> None:
        """Requests that all processes save and stop; for any hook on any process (timing: see `boost.train.hooks`)."""
        self._stop_reason = self._stop_reason or reason

    def request_save(self) -> None:
        """Requests a checkpoint; for any hook on any process (timing: see `boost.train.hooks`)."""
        self._save_requested = True

    def warn(self, text: str) -> None:
        """Logs a warning and shows it to this process's hooks; the console prints it."""
        log.warning(text)
        self.notify(Hook.on_warning, text)

    def _take_flags(self) -> StepFlags:
        """The requests of this process. A stop stays requested until the run ends, a save is requested once."""
        by_signal = self._signals.take_save_request()
        save = StepFlags.SAVE if self._save_requested or by_signal else StepFlags.NONE
        self._save_requested = False
        signal = StepFlags.SIGNAL if self._signals.requested else StepFlags.NONE
        if self.recovery is not None and self.mesh.is_main and self.recovery.someone_waits():
            signal |= StepFlags.JOIN
        return signal | save | (StepFlags.STOP if self._stop_reason is not None else StepFlags.NONE)

    def _signal_anywhere(self) -> bool:
        """Whether any process has received a stop signal outside of a step. Collective."""
        self._signals_to_reduce = False
        return bool(self.mesh.together(self._signal_now))

    def _signal_now(self) -> bool:
        own = StepFlags.SIGNAL if self._signals.requested else StepFlags.NONE
        return StepFlags.SIGNAL in reduce_flags(own, self.mesh)

    def _is_saved(self) -> bool:
        """Whether this run, or the run that it resumes, has saved the current position."""
        path = ckpt.checkpoint_path(self.run.checkpoints, self.position.step)
        return path in (self._saved, self.resumed_from)

    def _result(self, stopped: StepFlags, evaluation: Evaluation | None) -> TrainResult:
        complete = ckpt.complete_checkpoints(self.run.checkpoints)
        latest = self._saved or (complete[-1] if complete else None)
        if not stopped:
            early = early_stop(self.position, self.config.train)
            return TrainResult(self.position, evaluation, latest, early=early)
        # A signal takes precedence over a hook: it determines the exit code, which schedulers rely on.
        by_signal = StepFlags.SIGNAL in stopped
        name = self._signals.name or "a signal to another process"
        reason = name if by_signal else self._stop_reason or "a hook of another process"
        return TrainResult(self.position, None, latest, reason, by_signal, self._signals.requested)

    def abandon_save(self) -> None:
        """The save in flight, if any, will not be complete: replicas change (`recovery`)."""
        self.abandoned_save = self._saver.abandon()

    def adopt(self, event: MembershipChange) -> None:
        """Goes on with other replicas (`recovery`), as what `mesh` says now, perhaps as the main process."""
        self.reducer.rejoin(self.mesh)
        self._stepper.prefetcher.close()
        promoted: list[Hook] = []
        if self.mesh.is_main:
            promoted, self._for_main = self._for_main, []
        if not self._is_fitting:  # a replica that has just come in: `fit` begins with all hooks
            self.hooks[:0] = promoted
            self._early.append(event)
            return
        self._runner.promote(self, promoted, TrainStart(self.position.step, self.config.train.steps))
        self.notify(Hook.on_membership, event)

    def notify(self, method: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Calls this method of `Hook` on every hook of this process. Returns their results."""
        return self._runner.call(method, self, *arguments)
