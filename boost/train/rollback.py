"""train.on_spike = "rollback": back to the newest proven checkpoint, past the data that led into trouble (as PaLM did by hand)."""

from dataclasses import replace
from typing import TYPE_CHECKING

from boost.errors import TrainingError
from boost.train import checkpoint as ckpt
from boost.train.hooks import Hook, Rollback

if TYPE_CHECKING:
    from boost.train.loop import Trainer

MAX_ROLLBACKS = 3
"""Rollbacks before the run is PAST_TROUBLE steps past the step that asked for them."""
PAST_TROUBLE = 32


class Rollbacks:
    """The rollbacks of one run."""

    def __init__(self) -> None:
        self._count = self._furthest = 0

    def roll_back(self, trainer: "Trainer", reason: str) -> None:
        """Loads the newest proven checkpoint and skips the data since then. Collective.

        Raises TrainingError if there is none, or after MAX_ROLLBACKS that did not bring the run past the trouble.
        """
        trainer.finish_save()
        before = trainer.position
        # One process looks: another might see a folder that is being renamed.
        look = trainer.proven_checkpoint if trainer.mesh.is_main else lambda: None
        target = ckpt.run_on_all(trainer.mesh, look, TrainingError)[0]
        if target is None:
            raise TrainingError(f"{reason}; train.on_spike = 'rollback' finds no checkpoint to return to")
        # One count for all trouble before the run is past it: a run that fails at the same step again and again gets nowhere.
        if before.step > self._furthest + PAST_TROUBLE:
            self._count = 0
        self._count += 1
        self._furthest = max(self._furthest, before.step)
        if self._count > MAX_ROLLBACKS:
            raise TrainingError(
                f"{reason}; {MAX_ROLLBACKS} rollbacks to '{target}' did not help: resume from it with a lower optim.lr"
            )
        trainer.load(ckpt.open_checkpoint(target))
        again = before.step - trainer.position.step
        trainer.position = replace(trainer.position, skipped=before.skipped + again)
        trainer.bad_steps, trainer.trouble = 0, None
        # A later checkpoint looks healthy and is not: it must not be what --resume auto finds if the run is killed now.
        for folder in trainer.checkpoint_folders:
            ckpt.supersede(folder, trainer.position.step, trainer.mesh)
        trainer.warn(f"{reason}; back at step {trainer.position.step}, skipping the data of {again} steps")
        event = Rollback(trainer.position.step, before.step, reason)
        trainer.notify(Hook.on_rollback, event)
