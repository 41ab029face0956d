"""Built-in hooks: timelines for ui.perfetto.dev, bad-step limit, replica check, periodic evaluations and saves."""

import contextlib
import logging
import math
import time
from collections.abc import Callable
from dataclasses import asdict

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from boost.config.schema import Config, TrainConfig
from boost.errors import NonFiniteError, StorageError, TrainingError, UnreadableDataError
from boost.text import JsonObject
from boost.train import checkpoint as ckpt
from boost.train.agreement import run_on_main
from boost.train.best_effort import best_effort
from boost.train.checkpoint import BestCheckpoint, read_best, write_best
from boost.train.events import BadStep, EvaluationEnd, Rollback, SaveEnd, StepEnd, StepStart
from boost.train.health import HealthMonitor, SpikeDetector
from boost.train.hooks import Hook
from boost.train.loop import Trainer
from boost.train.samples import TextSamples

log = logging.getLogger("boost")

MAX_BAD_STEPS = 3
"""The run fails after this many consecutive steps with a non-finite loss or gradient norm. Such steps change no weights."""


def builtin_hooks(config: Config) -> list[Hook]:
    """The built-in hooks, in the order in which they run."""
    train = config.train
    return [
        BadStepLimit(),
        ReplicaCheck(train.check_replicas_every),
        HealthMonitor(SpikeDetector(train.spike_sigma, config.model.vocab_size), train.on_spike == "rollback"),
        PeriodicEvaluation(train.eval_every, train.eval_tokens or None, at_last_step=train.keep_best),
        PeriodicCheckpoint(train),
        *([TextSamples(train.sample_tokens, train.sample_prompts)] if train.sample_tokens else []),
        *([ProfileHook(*train.profile)] if train.profile else []),
    ]


class BadStepLimit(Hook):
    """Raises TrainingError after `MAX_BAD_STEPS` bad steps in a row."""

    def on_bad_step(self, trainer: Trainer, event: BadStep) -> None:
        what = f"loss {event.loss}, gradient norm {event.gradient_norm} at step {event.step}"
        log.warning("%s: not finite, so the step changed no weights", what)
        if event.consecutive >= MAX_BAD_STEPS:
            optim, proven = trainer.config.optim, None
            with contextlib.suppress(OSError):
                proven = trainer.judge.proven()
            raise TrainingError(
                f"{what}: not finite for {event.consecutive} steps in a row, and these steps changed no weights; resume with "
                f"--resume {proven or 'PATH'} and a lower optim.lr (now {optim.lr}) or more optim.warmup_steps"
            )


class ReplicaCheck(Hook):
    """Compares the weights of all replicas before the first step, every `every` steps (0: never), and after bad steps, so that a
    corrupted weight is reported before `BadStepLimit` can suggest a lower learning rate."""

    def __init__(self, every: int) -> None:
        self.every = every

    def on_train_start(self, trainer: Trainer) -> None:
        trainer.check_replicas()

    def on_bad_step(self, trainer: Trainer, event: BadStep) -> None:
        trainer.check_replicas()

    def after_step(self, trainer: Trainer, event: StepEnd) -> None:
        if _due(event.metrics.step, self.every):
            trainer.check_replicas()


class PeriodicEvaluation(Hook):
    """Evaluates every `every` steps (0: never) on `max_tokens` held-out tokens. The trainer runs the final evaluation on the
    whole split. With `at_last_step`, an evaluation due at the last step also runs, for comparison with earlier evaluations."""

    def __init__(self, every: int, max_tokens: int | None, at_last_step: bool = False) -> None:
        self.every, self.max_tokens = every, max_tokens
        self.at_last_step = at_last_step and max_tokens is not None

    def after_step(self, trainer: Trainer, event: StepEnd) -> None:
        left_out = event.stopping or (event.last and not self.at_last_step)
        if _due(event.metrics.step, self.every) and not left_out:
            try:
                trainer.evaluate(self.max_tokens)
            except UnreadableDataError as error:
                trainer.warn(f"no evaluation at step {event.metrics.step}: {error}; training continues")


class PeriodicCheckpoint(Hook):
    """Saves checkpoints periodically, on request, and at the end of the run. Deletes old ones."""

    def __init__(self, train: TrainConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.train, self._clock = train, clock
        self._saved_at = clock()
        self._best: BestCheckpoint | None = None
        self._knows_best = False
        self._candidate: BestCheckpoint | None = None
        """The last evaluated step if it is the best so far and not yet saved."""
        self._saved_step: int | None = None

    def state(self) -> JsonObject:
        checkpoints = {"best": self._best, "candidate": self._candidate}
        return {name: asdict(checkpoint) if checkpoint else None for name, checkpoint in checkpoints.items()}

    def take_state(self, state: JsonObject) -> None:
        self._best, self._candidate = (
            BestCheckpoint(**state[name]) if state[name] else None for name in ("best", "candidate")
        )
        self._knows_best = True

    def on_train_start(self, trainer: Trainer) -> None:
        self._saved_at = self._clock()
        if not self._knows_best:  # a process that joins later has received another's state
            # All processes must agree whether an evaluation is the best so far, because they then save.
            self._best = run_on_main(trainer.mesh, lambda: read_best(trainer.run.checkpoints), StorageError)
        if trainer.resumed_from and trainer.resumed_from.parent == trainer.run.checkpoints:
            self._saved_step = trainer.position.step
        train = self.train
        if train.async_save and (train.save_every or train.save_minutes):
            trainer.saves.prepare()

    def before_step(self, trainer: Trainer, event: StepStart) -> None:
        # Only the main process checks its clock; its request is reduced with the step statistics.
        late = self._clock() - self._saved_at >= 60 * self.train.save_minutes
        if trainer.mesh.is_main and self.train.save_minutes and late:
            self._saved_at = self._clock()
            trainer.request_save()

    def on_evaluation(self, trainer: Trainer, event: EvaluationEnd) -> None:
        this = BestCheckpoint(event.metrics.step, event.metrics.heldout_loss)
        # Include the candidate checkpoint, whose save may still be in flight.
        lowest = all(this.heldout_loss < other.heldout_loss for other in (self._best, self._candidate) if other)
        # Use the same tokens as periodic evaluations, because losses on different tokens are not comparable.
        comparable = event.complete == (not self.train.eval_tokens)
        if comparable and lowest and math.isfinite(this.heldout_loss):
            self._candidate = this
            if trainer.at_end and self._saved_step == this.step:  # the final evaluation follows the last save
                self._record_best(trainer)

    def on_rollback(self, trainer: Trainer, event: Rollback) -> None:
        self._candidate = None
        if self._best and self._best.step > event.step:  # on the abandoned branch
            self._best = None

    def after_step(self, trainer: Trainer, event: StepEnd) -> None:
        rolls_back = trainer.judge.rollback_reason is not None
        if event.stopping or (trainer.at_end and not rolls_back):
            # A failure here ends the run, because no later save would preserve these weights.
            trainer.save_last(urgent=event.stopping)
            return
        step, candidate = event.metrics.step, self._candidate
        is_best = self.train.keep_best and candidate is not None and candidate.step == step
        if not rolls_back and (event.save_requested or is_best or _due(step, self.train.save_every)):
            try:
                trainer.save(wait=not self.train.async_save)
            except (StorageError, NonFiniteError) as error:
                trainer.warn(f"{error}; training continues and earlier checkpoints are intact")

    def after_save(self, trainer: Trainer, event: SaveEnd) -> None:
        self._saved_at = self._clock()
        self._saved_step = event.step

        def record() -> None:
            trainer.run.require_owned()  # of run.dir, wherever the checkpoint is
            trainer.run.record_saved(event.path, event.step)

        # The checkpoint is complete, so a failure here must not look like a failed save. All processes see the same failure.
        with best_effort("write last-saved.json", trainer.warn, StorageError):
            run_on_main(trainer.mesh, record, StorageError)
        if self._candidate and self._candidate.step == event.step:
            self._record_best(trainer)
        best = {self._best.step} if self.train.keep_best and self._best else set()

        def remove_old() -> None:
            trainer.run.require_owned()
            proven = trainer.judge.proven()
            protected = best | {step for step in [ckpt.step_of(proven)] if step is not None} if proven else best
            ckpt.rotate(trainer.run.checkpoints, self.train.keep, self.train.keep_every, protected)

        with best_effort("remove old checkpoints", trainer.warn, StorageError):
            run_on_main(trainer.mesh, remove_old, StorageError)

    def _record_best(self, trainer: Trainer) -> None:
        """Records the candidate, which is now saved, as the best checkpoint."""
        self._best, self._candidate = best, _ = self._candidate, None
        if self.train.keep_best and best:
            with best_effort("write best.json", trainer.warn, StorageError):
                run_on_main(trainer.mesh, trainer.run.require_owned, StorageError)
                run_on_main(trainer.mesh, lambda: write_best(trainer.run.checkpoints, best), StorageError)


class ProfileHook(Hook):
    """Profiles steps `first` to `last` on every process, and writes run.dir/profile/rank<R>.json (train.profile).

    The files are in Chrome's trace format; open them in ui.perfetto.dev. They show CPU operators and collectives, GPU
    kernels, and a range for each step. Profiled steps are slower.
    """

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last
        self._profiler: profile | None = None
        self._step: tuple[int, record_function] | None = None
        """The current step's number and open profiler range. On GPUs, the next step begins before `after_step`."""

    def before_step(self, trainer: Trainer, event: StepStart) -> None:
        if event.step == self.first:
            on_gpu = trainer.mesh.device.type == "cuda"
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
            self._profiler = profile(activities=activities)
            self._profiler.start()
        if self._profiler is not None:
            self._end_step()
            self._step = event.step, record_function(f"step {event.step}")
            self._step[1].__enter__()

    def after_step(self, trainer: Trainer, event: StepEnd) -> None:
        if self._step is not None and self._step[0] == event.metrics.step:
            self._end_step()
        if event.metrics.step == self.last or event.last or event.stopping:
            self._write(trainer)

    def teardown(self, trainer: Trainer) -> None:
        self._write(trainer)

    def _end_step(self) -> None:
        if self._step is not None:
            self._step[1].__exit__(None, None, None)
            self._step = None

    def _write(self, trainer: Trainer) -> None:
        self._end_step()
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        if trainer.mesh.device.type == "cuda":
            torch.cuda.synchronize(trainer.mesh.device)
        profiler.stop()
        folder = trainer.run.path / "profile"
        file = folder / f"rank{trainer.mesh.rank}.json"
        with best_effort(f"write the timeline of steps {self.first} to {self.last}", trainer.warn):
            folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(file))
            log.info("wrote the timeline of steps %d-%d to %s (open in ui.perfetto.dev)", self.first, self.last, file)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
