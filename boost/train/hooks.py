"""Hooks: code that runs around training steps.

A hook is a class with one method per event. Subclass `Hook`, override what you need, and pass it to the trainer:

    class StopAtLoss(Hook):
        def after_step(self, trainer, event):
            if event.metrics.loss < 2.0:
                trainer.request_stop("loss below 2.0")

    boost.Trainer(config, hooks=[StopAtLoss()]).fit()

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

import warnings
from typing import TYPE_CHECKING, Any, ClassVar

from boost.text import JsonObject
from boost.train import events

if TYPE_CHECKING:  # this module is imported before torch
    from boost.train.loop import Trainer


class Hook:
    """Base class of all hooks. Every method does nothing by default. See the module docstring for the order of events."""

    main_only: ClassVar[bool] = False
    """Whether the hook runs on the main process only."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, value in vars(cls).items():
            if name.startswith(("on_", "before_", "after_")) and callable(value) and not hasattr(Hook, name):
                warnings.warn(
                    f"no run calls {cls.__name__}.{name}: it is not an event of boost.Hook; rename it", stacklevel=2
                )

    def setup(self, trainer: "Trainer") -> None:
        """Acquires resources such as files and connections. Called before any hook gets `on_train_start`."""

    def on_train_start(self, trainer: "Trainer") -> None:
        """Called once before the first step, when training starts or resumes."""

    def before_step(self, trainer: "Trainer", event: events.StepStart) -> None:
        """Called before each step."""

    def after_backward(self, trainer: "Trainer") -> None:
        """Called in each step after gradients are reduced, before their norm is computed and they are clipped and applied."""

    def on_bad_step(self, trainer: "Trainer", event: events.BadStep) -> None:
        """Called before `after_step` for a step with a non-finite loss or gradient norm, on all processes.

        `trainer.position` is already the position after the step.
        """

    def after_step(self, trainer: "Trainer", event: events.StepEnd) -> None:
        """Called after each step, including bad steps."""

    def before_save(self, trainer: "Trainer", event: events.SaveStart) -> str | None:
        """Called before a checkpoint is written. Return a reason to refuse it, None to allow it."""
        return None

    def after_save(self, trainer: "Trainer", event: events.SaveEnd) -> None:
        """Called after a checkpoint is complete."""

    def on_event(self, trainer: "Trainer", event: events.RunEvent) -> None:
        """Called for any other event at any point in the run, such as the loss or return of a replica."""

    def state(self) -> JsonObject:
        """State of the hook as JSON-serializable values, which a process that joins the run loads. Empty by default."""
        return {}

    def take_state(self, state: JsonObject) -> None:
        """Loads the `state` that the same hook had on another process."""

    def on_rollback(self, trainer: "Trainer", event: events.Rollback) -> None:
        """Called after a rollback has loaded the weights, optimizer state and position of an earlier checkpoint."""

    def on_evaluation(self, trainer: "Trainer", event: events.EvaluationEnd) -> None:
        """Called after each evaluation."""

    def on_sample(self, trainer: "Trainer", event: events.SampleEnd) -> None:
        """Called for each text sample, after an evaluation (train.sample_tokens)."""

    def on_warning(self, trainer: "Trainer", text: str) -> None:
        """Called for each `trainer.warn(text)` on this process."""

    def on_train_end(self, trainer: "Trainer", result: events.TrainResult) -> None:
        """Called once at the end of the run, unless it failed: after the final evaluation, or once a stopped run is saved."""

    def teardown(self, trainer: "Trainer") -> None:
        """Releases resources. Always called at the end of the run, even if `setup` was not called."""
