"""The hooks of every run, from its configuration: the limit of bad steps, periodic evaluation, periodic checkpoints."""

import logging
from typing import TYPE_CHECKING

from boost.config.schema import TrainConfig
from boost.errors import StorageError, TrainingError
from boost.train import checkpoint as ckpt
from boost.train.hooks import BadStep, Hook, SaveEnd, StepEnd

if TYPE_CHECKING:
    from boost.train.loop import Trainer

log = logging.getLogger("boost")

MAX_BAD_STEPS = 3
"""Steps in a row whose loss or gradient norm is not finite before the run gives up; none of them changes a weight."""


def builtin_hooks(train: TrainConfig) -> list[Hook]:
    """The built-in hooks in their order."""
    return [
        BadStepLimit(),
        PeriodicEvaluation(train.eval_every, train.eval_tokens or None),
        PeriodicCheckpoint(train.save_every, train.keep),
    ]


class BadStepLimit(Hook):
    """Raises TrainingError after `limit` bad steps in a row."""

    def __init__(self, limit: int = MAX_BAD_STEPS) -> None:
        self.limit = limit

    def on_bad_step(self, trainer: "Trainer", event: BadStep) -> None:
        what = f"loss {event.loss}, gradient norm {event.gradient_norm} at step {event.step}"
        log.warning("%s: no weight was changed", what)
        if event.consecutive >= self.limit:
            optim = trainer.config.optim
            raise TrainingError(
                f"{what}: not finite for {event.consecutive} steps in a row, no weight was changed; resume from a checkpoint "
                f"with a lower optim.lr (now {optim.lr}) or more optim.warmup_steps"
            )


class PeriodicEvaluation(Hook):
    """Evaluates every `every` steps (0: never) on `max_tokens` held-out tokens. The trainer does the final evaluation."""

    def __init__(self, every: int, max_tokens: int | None) -> None:
        self.every, self.max_tokens = every, max_tokens

    def after_step(self, trainer: "Trainer", event: StepEnd) -> None:
        if _due(event.metrics.step, self.every) and not (event.last or event.stopping):
            trainer.evaluate(self.max_tokens)


class PeriodicCheckpoint(Hook):
    """Saves every `every` steps (0: never), on request, and where the run ends; keeps the newest `keep` checkpoints."""

    def __init__(self, every: int, keep: int) -> None:
        self.every, self.keep = every, keep

    def after_step(self, trainer: "Trainer", event: StepEnd) -> None:
        if event.last or event.stopping:
            trainer.save()  # its failure is the run's: nothing after it would keep these weights
        elif event.save_requested or _due(event.metrics.step, self.every):
            try:
                trainer.save()
            except StorageError as error:
                trainer.warn(f"{error}; training continues, earlier checkpoints are intact")

    def after_save(self, trainer: "Trainer", event: SaveEnd) -> None:
        ckpt.remove_old(trainer.run.checkpoints, self.keep, trainer.mesh)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
