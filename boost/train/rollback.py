"""train.on_spike = "rollback": returns to the newest proven checkpoint and skips the data since then (PaLM did this manually)."""

from dataclasses import replace
from typing import TYPE_CHECKING

from boost.errors import TrainingError
from boost.train import checkpoint as ckpt
from boost.train.hooks import Hook, Rollback

if TYPE_CHECKING:
    from boost.train.loop import Trainer

MAX_ROLLBACKS = 3
"""Maximum number of rollbacks for the same trouble."""
PAST_TROUBLE = 32
"""Steps beyond the furthest step of a rollback after which the trouble is over and the count starts again."""


class Rollbacks:
    """The rollbacks of one run."""

    def __init__(self) -> None:
        self.count = self.furthest = 0
        """Rollbacks for the current trouble, and the furthest step at which one of them was requested."""

    def roll_back(self, trainer: "Trainer", reason: str) -> None:
        """Loads the newest proven checkpoint and skips the data since then. Collective.

        Raises TrainingError if there is none, or if MAX_ROLLBACKS did not get the run past the trouble.
        """
        trainer.finish_save()
        before = trainer.position
        # Resetting the count earlier would let the run fail at the same step forever.
        if before.step > self.furthest + PAST_TROUBLE:
            self.count = 0
        self.count += 1
        self.furthest = max(self.furthest, before.step)
        trainer.mesh.together(lambda: self._return(trainer, reason))
        undone = before.step - trainer.position.step
        trainer.position = replace(trainer.position, skipped=before.skipped + undone)
        trainer.bad_steps, trainer.trouble = 0, None
        trainer.warn(f"{reason}; rolled back to step {trainer.position.step}, skipping the data of {undone} steps")
        event = Rollback(trainer.position.step, before.step, reason)
        trainer.notify(Hook.on_rollback, event)

    def _return(self, trainer: "Trainer", reason: str) -> None:
        """Loads the newest proven checkpoint and marks later ones as superseded. Collective; repeated if a replica is lost."""
        # Only the main process searches: others might see a folder that is being renamed.
        look = trainer.proven_checkpoint if trainer.mesh.is_main else lambda: None
        target = ckpt.run_on_all(trainer.mesh, look, TrainingError)[0]
        if target is None:
            raise TrainingError(f"{reason}; train.on_spike = 'rollback' finds no checkpoint to return to")
        if self.count > MAX_ROLLBACKS:
            raise TrainingError(
                f"{reason}; {MAX_ROLLBACKS} rollbacks to '{target}' did not help: resume from it with a lower optim.lr"
            )
        trainer.load(ckpt.open_checkpoint(target))
        # Later checkpoints may look healthy but are not. --resume auto must not find them if the run is killed now.
        for folder in trainer.checkpoint_folders:
            ckpt.supersede(folder, trainer.position.step, trainer.mesh)
        trainer.mesh.barrier()
