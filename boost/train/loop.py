"""The training loop, on one process or on a mesh. It calls hooks around each step.

A step is a pure function of (weights, optimizer state, step number): the data, the learning rate and everything else
depend only on the step number. A resumed run is therefore bitwise identical to an uninterrupted one.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from boost.config import Config
from boost.config.architecture import flops_per_token
from boost.data.batches import Batches
from boost.data.fit import open_corpus
from boost.data.mixture import Corpus
from boost.errors import BoostError, DamagedCheckpointError, DataError, NonFiniteError, StorageError, TrainingError
from boost.optim.schedule import learning_rate
from boost.parallel.gradients import StepFlags, StepStats, reduce_flags
from boost.parallel.mesh import Mesh
from boost.parallel.weights import forget_gathered
from boost.text import JsonObject
from boost.train import checkpoint as ckpt
from boost.train import events
from boost.train.agreement import require_same, run_on_all
from boost.train.checkpoint import Checkpoint, CheckpointSaver, Position, SavedCheckpoint, load
from boost.train.evaluate import Evaluation
from boost.train.hardware import StepClock, memory_bytes, mfu, peak_flops
from boost.train.heartbeat import Phase, enter
from boost.train.judge import Judge
from boost.train.model import Model, build_model, initialize_model, require_called, require_trained
from boost.train.replicas import require_sound
from boost.train.resume import check_resumable, inherited_data, require_start, resume_warnings
from boost.train.rundir import RunDirectory, flat_config
from boost.train.saves import Saves
from boost.train.signals import StopRequest
from boost.train.step import Passes, Stepper, Update
from boost.version import __version__

log = logging.getLogger("boost")

SLOW_SAVE_S = 1.0
"""A save that waits longer than this, in seconds, for the previous background save logs a warning."""
LAST_SAVE_S = 60.0
"""Maximum time, in seconds, for which a failing run waits for a background save to finish."""

BuildStepper = Callable[[Config, Mesh, Model, Batches], Stepper]


class Trainer:
    """A training run on this process: weights, optimizer, data, position, and hooks.

    `fit` trains to the end. `step`, `evaluate` and `save` can also be called directly; call them on all processes in the mesh.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        run: RunDirectory,
        hooks: Sequence[events.AnyHook] = (),
        build_stepper: BuildStepper = Stepper,
    ) -> None:
        """Builds the run's state at step 0. Raises DataError if the token store does not match the configuration.

        `hooks`: all hooks of the run, in order. `boost train` adds the built-in ones (`boost.train.builtin_hooks`).
        """
        self.config, self.mesh, self.run = config, mesh, run
        train = config.train
        self.corpus = self._open_corpus()
        self.store, self.heldout = self.corpus.stores[0], self.corpus.split("heldout")
        isolated, split = config.data.isolate_documents, self.corpus.split("train")
        self.batches = Batches(split, train.seq_len, train.global_batch, train.seed, isolated)
        torch.manual_seed(train.seed + mesh.rank)
        self.model: Model = build_model(config, mesh)
        self.stepper = build_stepper(config, mesh, self.model, self.batches)
        self.fused_params, self.optimizer = self.stepper.fused_params, self.stepper.optimizer
        self.flops_per_token = flops_per_token(config.model, train.seq_len)
        self.peak_flops = peak_flops(mesh.device, getattr(torch, train.compute_dtype), config.run.peak_tflops)
        self.position = Position(0, 0)
        self.inherited: JsonObject = {}
        """Data that this run's checkpoints inherit from the one that it resumed or started from."""
        self.resumed_from: Path | None = None
        self.started_from: Path | None = None
        self.warnings: list[str] = []
        """Warnings from before the first step."""
        self.all_hooks = list(hooks)
        """All hooks of the run; `hooks` are those that run on this process."""
        self.hooks = [hook for hook in self.all_hooks if mesh.is_main or not hook.main_only]
        self.recent: list[events.StepMetrics | events.EvalMetrics] = []
        """Metrics of the latest step."""
        self.takes_over = False
        """Whether this process becomes the main process of a run in progress, whose latest step may not have been recorded yet."""
        self._main_only_hook: events.AnyHook | None = None
        """The main-only hook that is running, if any."""
        self.requested = StepFlags.NONE
        """What this process requests with the next step's statistics, in addition to a stop."""
        self.signals_to_reduce = False
        """Whether a stop signal may have arrived outside a step: during startup, an evaluation or a save."""
        self._signals = StopRequest()
        self._stop_reason: str | None = None
        self._unreadable: DataError | None = None
        """Why this process cannot read the data of the next steps."""
        self._saved: Path | None = None
        self._said_empty = False
        # Read the tokenizer once, because the store on disk may be replaced or deleted during training.
        tokenizer, data = self.store.tokenizer_json.encode(), self.corpus.identity()
        saver = CheckpointSaver(self.model, self.optimizer, config, tokenizer, data, mesh, run.require_owned)
        self.saves = Saves(config, mesh, run, saver, self.warn)
        self.judge = Judge(self.stepper, self.heldout, self.saves)

    def _open_corpus(self) -> Corpus:
        """Opens the token stores. Raises the error of the first process that cannot, on all of them."""
        opened: list[Corpus] = []

        def open_here() -> None:
            try:
                opened.append(open_corpus(self.config))
            except BoostError as error:
                raise type(error)(f"process {self.mesh.rank}: {error}" if self.mesh.size > 1 else str(error)) from None

        run_on_all(self.mesh, open_here, BoostError)
        return opened[0]

    def start(self, resume_from: list[Path], start_from: str | None = None) -> None:
        """Loads the first checkpoint in `resume_from` that all processes can read. If the list, which must be the same on all
        processes, is empty, starts at step 0 from the weights of `start_from`, or from initial weights. Collective.

        Raises CheckpointError if the checkpoint does not match the model or the data, or if all checkpoints are damaged, and
        ConfigError if processes differ in configuration, software or data.
        """
        require_same(self.mesh, self.facts())
        self.warnings += ckpt.incomplete_warnings(self.run.checkpoints, resume_from)
        damaged: list[str] = []
        checkpoint: Checkpoint | None = None
        for path in resume_from:
            try:
                checkpoint = self._resume(path)
            except DamagedCheckpointError as error:
                damaged.append(str(error))
                if len(damaged) == len(resume_from):
                    raise DamagedCheckpointError("; ".join(damaged)) from None
                self.warnings.append(f"{error}; trying the previous checkpoint")
            else:
                self.resumed_from = checkpoint.path
                if checkpoint.position.doubt:
                    self.judge.trouble = events.RunTrouble(checkpoint.position.doubt, ruined=False)
                self.warnings += resume_warnings(checkpoint, resume_from, self.config)
                log.info("resumed from %s at step %d", checkpoint.path, self.position.step)
                break
        else:
            if start_from is None:
                initialize_model(self.model, self.config.train.seed, show=self.mesh.is_main)
            else:
                checkpoint = ckpt.read_checkpoint(Path(start_from), self._load_weights, self.mesh)
                self.started_from = checkpoint.path
                log.info("initialized from the weights of %s", self.started_from)
                if any((checkpoint.data.get(ckpt.TRAITS) or {}).values()):
                    self.warnings.append(
                        "parameters that are frozen or tied in the checkpoint are trained, each by itself"
                    )
        self.inherit(inherited_data(self.config, checkpoint))
        for warning in self.warnings:
            log.warning(warning)
        self.saves.supersede_later(self.resumed_from, self.position.step)

    def facts(self) -> JsonObject:
        """What must be equal on all processes, by name, as JSON values. Paths may differ: what they lead to is compared."""
        fields = flat_config(
            self.config.model_dump(mode="json", exclude={"run": {"dir", "device"}, "data": {"store", "mixture"}})
        )
        versions = {"boost": __version__, "torch": str(torch.__version__), "device": self.mesh.device.type}
        stores = [
            [store.content("train"), store.content("heldout"), str(weight)]
            for store, weight in zip(self.corpus.stores, self.corpus.weights, strict=True)
        ]
        return {**versions, **fields, "token stores": stores, "tokenizer": self.store.fingerprint}

    def _resume(self, path: Path) -> Checkpoint:
        """Loads a checkpoint. Tries twice, because a read from a network file system may fail once."""
        pauses = iter(load.SETTLE_PAUSES_S)
        for again in (False, True):
            try:
                checkpoint = ckpt.open_on_all(
                    path, self.mesh, lambda found: check_resumable(found, self.config, self.corpus), pauses
                )
                self.load(checkpoint)
                break
            except DamagedCheckpointError as error:
                if again:
                    raise
                log.warning("%s; trying again", error)
        return checkpoint

    def _load_weights(self, checkpoint: Checkpoint) -> Checkpoint:
        """Loads the weights that a run starts from. Collective. Raises CheckpointError or DataError if they do not fit."""
        run_on_all(self.mesh, lambda: require_start(checkpoint, self.config, self.store), BoostError)
        ckpt.load_weights(checkpoint, self.model, self.mesh)
        return checkpoint

    def inherit(self, data: JsonObject) -> None:
        """Makes this run's checkpoints record `data` (`inherited_data`)."""
        self.inherited = data
        self.saves.saver.add_data(data)

    def load(self, checkpoint: Checkpoint) -> None:
        """Loads weights, optimizer state, RNG states and position from a checkpoint. Collective. Raises CheckpointError."""
        position = ckpt.load_training_state(checkpoint, self.model, self.optimizer, self.mesh)
        forget_gathered(self.model)
        self.position = replace(position, trouble="", doubt="")

    @property
    def at_end(self) -> bool:
        """Whether no step is left."""
        return self.position.step >= self.config.train.steps

    def fit(self) -> events.TrainResult:
        """Trains from the current position to the end and then evaluates. Stops early on a signal or at the request of a hook.

        Hooks save checkpoints: periodically, when the run stops, and after the last step.
        """
        try:
            self.notify("setup")
            self.notify("on_train_start")
            require_called(self.model)
            require_trained(self.model, self.fused_params)
            with StopRequest() as self._signals:
                stopped = self._train()
                if stopped == StepFlags.STOP:
                    run_on_all(self.mesh, self._require_data, DataError)
                # Keep catching signals, so that a late one does not discard the results of a saved run.
                self.finish_save()
                evaluation = None if stopped else self.evaluate()
                if not stopped and evaluation is None:
                    stopped = StepFlags.SIGNAL
                result = self._result(stopped, evaluation)
                self.notify("on_train_end", result)
            return result
        finally:
            self._stop_reason, self.requested = None, StepFlags.NONE
            self.stepper.prefetcher.close()
            self.saves.saver.close(LAST_SAVE_S)
            for hook in self.hooks:
                try:
                    self._call(hook, "teardown")
                except Exception:  # the outcome of the run is already decided
                    log.exception("teardown of %s failed", type(hook).__name__)

    def _train(self) -> StepFlags:
        """Runs steps until the end or until any process requests a stop. Returns the flags that stopped the run, if any."""
        stepper, judge, saver = self.stepper, self.judge, self.saves.saver
        clock = StepClock(stepper.timed_on)
        self.signals_to_reduce = True
        passes: Passes | None = None
        while not self.at_end:
            if self.signals_to_reduce:
                self.signals_to_reduce = False
                if self.mesh.together(self._signal_now):
                    self.finish_save()  # the save in flight may be for this position
                    here = ckpt.checkpoint_path(self.run.checkpoints, self.position.step)
                    if here not in (self._saved, self.resumed_from):
                        self.save_last(urgent=True)
                    return StepFlags.SIGNAL
            if passes is None or not stepper.is_current(passes, self.position):
                passes = self._begin_step(clock)
            clock.resume()
            update = self._launch_update(passes)
            last = self.position.step == self.config.train.steps
            passes = self._begin_step(clock) if stepper.ahead and not last else None
            stats = stepper.read(update)
            self._count(stats)
            seconds = clock.seconds(update.end)
            clock.pause()
            if saver.in_flight is not None and self.mesh.together(saver.done_everywhere):
                self.finish_save()
            metrics = step_metrics(self, stats, update.lr, seconds)
            self.recent = [metrics]
            if self.run.lock is not None:
                self.run.lock.require_not_taken(self.warn)
            stop = stats.flags & (StepFlags.SIGNAL | StepFlags.STOP) if not last else StepFlags.NONE
            save, joins = StepFlags.SAVE in stats.flags, StepFlags.JOIN in stats.flags
            empty = stats.is_finite and not stats.updates
            end = events.StepEnd(metrics, judge.bad_steps > 0, last, bool(stop), save, empty, joins)
            self.notify("after_step", end)
            if stop:
                return stop
            if judge.rollback_reason is not None:
                self._roll_back()
        return StepFlags.NONE

    def _require_data(self) -> None:
        """Raises DataError if the run was stopped, and saved, because this process cannot read the data of the next steps."""
        if self._unreadable:
            raise type(self._unreadable)(f"{self._unreadable} (saved at step {self.position.step})")

    def _begin_step(self, clock: StepClock) -> Passes:
        step = self.position.step
        enter(Phase.STEP, step + 1)
        lr = learning_rate(self.config.optim, step, self.config.train.steps)
        self.notify("before_step", events.StepStart(step + 1, lr))
        clock.resume()
        return self._launch_passes(lr)

    def step(self, lr: float) -> StepStats:
        """Runs one optimizer step on one global batch. Updates nothing if the loss or the gradient norm is not finite, or if no
        token counts toward the loss.

        Raises TrainingError after too many consecutive bad steps (`BadStepLimit`).
        """
        stats = self.stepper.read(self._launch_update(self._launch_passes(lr)))
        self._count(stats)
        return stats

    def _launch_passes(self, lr: float) -> Passes:
        passes = self.stepper.passes(self.position, lr, self.stepper.batch(self.position))
        self.notify("after_backward")
        return passes

    def _launch_update(self, passes: Passes) -> Update:
        """Launches a step's update and advances the position."""
        update = self.stepper.update(passes, self._take_flags())
        step, tokens = self.position.step + 1, self.position.tokens + self.stepper.tokens
        self.position = replace(self.position, step=step, tokens=tokens)
        return update

    def _count(self, stats: StepStats) -> None:
        """Counts bad steps. `stats`: statistics for the step that led to the current position."""
        self.judge.bad_steps = 0 if stats.is_finite else self.judge.bad_steps + 1
        if not stats.is_finite:
            event = events.BadStep(self.position.step, stats.loss, stats.gradient_norm, self.judge.bad_steps)
            self.notify("on_bad_step", event)
        elif not stats.updates:
            say = log.info if self._said_empty else self.warn
            say(f"step {self.position.step} changed nothing, because none of its tokens has a target")
            self._said_empty = True

    def _roll_back(self) -> None:
        """Returns to the newest proven checkpoint and skips the data used since then, as PaLM's authors did by hand. Collective.

        Raises TrainingError if there is none, or if the run has not recovered after several rollbacks.
        """
        self.finish_save()
        before, reason = self.position, self.judge.begin_rollback(self.position.step)

        def load_proven() -> None:
            target = self.judge.rollback_target(reason)
            self.load(ckpt.open_on_all(target, self.mesh))
            # They may look healthy, but are not. Do this now, because the run may be killed.
            self.saves.supersede_later(target, self.position.step)
            self.mesh.barrier()

        self.mesh.together(load_proven)
        undone = before.step - self.position.step
        self.position = replace(self.position, skipped=before.skipped + undone)
        self.judge.bad_steps, self.judge.trouble = 0, None
        self.warn(f"{reason}; rolled back to step {self.position.step}, skipping the data of {undone} steps")
        self.notify("on_rollback", events.Rollback(self.position.step, before.step, reason))

    def evaluate(self, max_tokens: int | None = None) -> Evaluation | None:
        """Evaluates the held-out split, or about `max_tokens` of it. Returns None if a signal stops the evaluation. Collective.
        Raises DataError on every process if any cannot read its share."""
        self._require_all_processes("evaluate")
        self.signals_to_reduce = True
        result = self.judge.evaluate(max_tokens, self._signal_now)
        if result is None:
            return None
        losses = result.loss, result.perplexity, result.bits_per_byte, result.tokens
        by_source = {name: source.loss for name, source in result.sources.items()}
        metrics = events.EvalMetrics(self.position.step, *losses, self.at_end and max_tokens is None, by_source)
        self.recent.append(metrics)
        if self.run.lock is not None:
            self.run.lock.require_not_taken(self.warn)
        self.notify("on_evaluation", events.EvaluationEnd(metrics, complete=max_tokens is None))
        return result

    def save(self, wait: bool = True) -> Path | None:
        """Saves a checkpoint of the current position. Returns its path, or None if a hook refused it. Collective.

        With `wait`, the checkpoint is complete on return. Without it, the save runs in the background: `save` returns None after
        the copy to host memory, hooks get `after_save` when the checkpoint is complete, and a failure only logs a warning. Only
        one save is in flight at a time; the next one waits for it.

        Raises StorageError on every process if any cannot write, NonFiniteError if weights or optimizer state are not
        finite, and TrainingError if replicas differ (a checkpoint stores one replica's weights).
        """
        if not self._may_save():
            return None
        if not wait:
            self.saves.start(self.judge.marked(self.position))
            return None
        return self._announce(self.saves.save(self.judge.marked(self.position)))

    def save_last(self, urgent: bool) -> Path | None:
        """Saves the run's last checkpoint like `save`, but retries (run.save_retry_minutes) and uses run.fallback_dir. Collective.

        `urgent`: a signal stopped the run, so run.fallback_dir is tried before the retries.
        """
        if not self._may_save(last=True, urgent=urgent):
            return None
        return self._announce(self.saves.save_last(self.judge.marked(self.position), urgent))

    def finish_save(self) -> None:
        """Waits for the save in flight, if any. A failed save only logs a warning. Collective."""
        try:
            if saved := self.saves.finish(self.judge.marked(self.position)):
                self._announce(saved)
        except (StorageError, NonFiniteError) as error:
            self.warn(f"{error}; training continues and earlier checkpoints are intact")

    def _may_save(self, last: bool = False, urgent: bool = False) -> bool:
        """Waits for the save in flight. Returns whether a new one may start, that is, whether no hook on any process refuses it."""
        self._require_all_processes("save")
        if not urgent:  # a signal saves whatever there is
            require_trained(self.model, self.fused_params)
        self.signals_to_reduce = True
        in_flight, begin = self.saves.saver.in_flight, time.perf_counter()
        self.finish_save()
        if in_flight is not None and (waited := time.perf_counter() - begin) > SLOW_SAVE_S:
            self.warn(
                f"training waited {waited:.1f} s for step {in_flight}'s checkpoint, which was still being written; save less "
                "often or write to a faster disk"
            )
        self.check_replicas()
        step = self.position.step

        def ask_hooks() -> list[str]:
            reasons = self.notify("before_save", events.SaveStart(step, last))
            return [str(reason or "refused by a hook") for reason in reasons if reason is not None]

        # These requests are not part of the step statistics, because saves are rare and a hook may inspect the current weights.
        answers = run_on_all(self.mesh, ask_hooks, TrainingError)
        if reason := next((reasons[0] for reasons in answers if reasons), None):
            self.warn(f"the checkpoint for step {step} was not saved: {reason}")
            return False
        return True

    def _announce(self, saved: SavedCheckpoint) -> Path:
        """Logs a complete checkpoint and notifies hooks."""
        for warning in saved.warnings:
            self.warn(warning)
        self._saved = saved.path
        log.info("saved %s", saved.path)
        with self.saves.rescuing(self.judge.marked(self.position), saved.path.parent):
            self.notify("after_save", events.SaveEnd(saved.step, saved.path))
        return saved.path

    def check_replicas(self, again: bool = False) -> None:
        """Compares the weights and moments of all replicas (`Judge.compare_replicas`). Collective.

        Raises TrainingError on every process; the error names the processes that differ or have a non-finite weight.
        """
        self._require_all_processes("check_replicas")
        report = self.judge.compare_replicas(self.position, again)
        if report.mismatches or report.not_finite:
            self.finish_save()  # the checkpoint to resume from may still be in flight
            require_sound(report, self.position.step, self.saves.latest())

    def request_stop(self, reason: str) -> None:
        """Requests that all processes save and stop. Any hook on any process may call it (timing: see `boost.train.hooks`)."""
        self._stop_reason = self._stop_reason or reason

    def request_save(self) -> None:
        """Requests a checkpoint. Any hook on any process may call it (timing: see `boost.train.hooks`)."""
        self.requested |= StepFlags.SAVE

    def warn(self, text: str) -> None:
        """Logs a warning and passes it to this process's hooks; the console hook prints it."""
        log.warning(text)
        self.notify("on_warning", text)

    def _take_flags(self) -> StepFlags:
        """Returns this process's requests. A stop stays requested until the run ends; other requests are cleared.

        Data that cannot be read stops the run before the others wait for it, unless they can go on without this replica."""
        flags, self.requested = self.requested, StepFlags.NONE
        if self.mesh.background is None:
            self._unreadable = self.stepper.prefetcher.failure(lambda: self._signals.requested)
            flags |= StepFlags.STOP if self._unreadable else StepFlags.NONE
        if self._signals.take_save_request():
            flags |= StepFlags.SAVE
        if self._signals.requested:
            flags |= StepFlags.SIGNAL
        return flags if self._stop_reason is None else flags | StepFlags.STOP

    def _signal_now(self) -> bool:
        own = StepFlags.SIGNAL if self._signals.requested else StepFlags.NONE
        return StepFlags.SIGNAL in reduce_flags(own, self.mesh)

    def _result(self, stopped: StepFlags, evaluation: Evaluation | None) -> events.TrainResult:
        latest = self._saved or self.saves.latest()
        if not stopped:
            return events.TrainResult(self.position, evaluation, latest)
        # A signal takes precedence over a hook, because it determines the exit code, which schedulers rely on.
        by_signal = StepFlags.SIGNAL in stopped
        name = self._signals.name or "a signal to another process"
        reason = name if by_signal else self._stop_reason or "a hook on another process"
        return events.TrainResult(self.position, None, latest, reason, by_signal, self._signals.requested)

    def notify(self, event: str, *arguments: object) -> list[object]:
        """Calls the method `event` of every hook on this process. Returns their results."""
        return [self._call(hook, event, *arguments) for hook in list(self.hooks)]  # `add_hooks` may add to it

    def _call(self, hook: events.AnyHook, event: str, *arguments: object) -> object:
        outer = self._main_only_hook
        self._main_only_hook = hook if hook.main_only else outer
        try:
            return getattr(hook, event)(self, *arguments)
        finally:
            self._main_only_hook = outer

    def add_hooks(self, hooks: Sequence[events.AnyHook]) -> None:
        """Sets up hooks for a run in progress and adds them before all others."""
        for hook in hooks:
            self._call(hook, "setup")
            self._call(hook, "on_train_start")
        self.hooks[:0] = hooks

    def _require_all_processes(self, method: str) -> None:
        """Raises RuntimeError in a main-only hook, because a collective method would wait forever for the other processes."""
        if self._main_only_hook is not None and self.mesh.size > 1:
            raise RuntimeError(
                f"{type(self._main_only_hook).__name__} runs on the main process only, but Trainer.{method} needs all processes; "
                "set main_only = False, or call request_save() for a checkpoint"
            )


def step_metrics(trainer: Trainer, stats: StepStats, lr: float, seconds: float) -> events.StepMetrics:
    """Metrics for the step that led to the trainer's current position."""
    train, mesh = trainer.config.train, trainer.mesh
    speed = train.global_batch * train.seq_len / seconds
    return events.StepMetrics(
        step=trainer.position.step,
        loss=stats.loss,
        lr=lr,
        gradient_norm=stats.gradient_norm,
        tokens_per_second=speed,
        mfu=mfu(speed, trainer.flops_per_token, mesh.size, trainer.peak_flops),
        memory_bytes=memory_bytes(mesh.device),
        tokens=trainer.position.tokens,
        seconds=seconds,
        cross_entropy=stats.cross_entropy,
    )
