"""Judges a run: its bad steps, its current trouble, its replicas, its held-out loss, and the checkpoint that it rolls back to.

All processes judge identically, because they judge by the same numbers. Hooks decide when (`boost.train.builtin_hooks`,
`boost.train.health`).
"""

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from boost.data.mixture import AnySplit
from boost.errors import TrainingError
from boost.text import JsonObject
from boost.train.agreement import run_on_main
from boost.train.checkpoint import Position
from boost.train.evaluate import Evaluation, EvaluationStopped, evaluate
from boost.train.events import RunTrouble
from boost.train.heartbeat import Phase, in_phase
from boost.train.replicas import ReplicaReport, check_replicas
from boost.train.saves import Saves
from boost.train.step import Stepper

MAX_ROLLBACKS = 3
"""Maximum number of rollbacks for the same problem."""
PAST_TROUBLE = 32
"""Number of steps past the furthest rollback request after which the problem is over and the count restarts."""


class Judge:
    """Judges one run. Methods that communicate are collective."""

    def __init__(self, stepper: Stepper, heldout: AnySplit, saves: Saves) -> None:
        self._stepper, self._heldout, self._saves = stepper, heldout, saves
        self.bad_steps = 0
        """Consecutive bad steps up to the current position."""
        self.trouble: RunTrouble | None = None
        """The run's current problem, as set by `HealthMonitor`."""
        self.proven_step = -1
        """The last step whose weights the next step's loss proved healthy, with no trouble since."""
        self.rollback_reason: str | None = None
        """Why a rollback follows this step; None if none does. Set it in `Hook.after_step`, on all processes."""
        self.rollbacks = self.furthest = 0
        """Rollbacks for the current problem, and the furthest step at which one was requested."""
        self._checked: Position | None = None
        """Position of the last successful replica check."""

    def state(self) -> JsonObject:
        """What a process that joins the run must know, as JSON-serializable values."""
        trouble = asdict(self.trouble) if self.trouble else None
        return {"trouble": trouble, **{name: getattr(self, name) for name in _COUNTS}}

    def take_state(self, state: JsonObject) -> None:
        self.trouble = RunTrouble(**state["trouble"]) if state["trouble"] else None
        for name in _COUNTS:
            setattr(self, name, state[name])

    def evaluate(self, max_tokens: int | None, stopped: Callable[[], bool]) -> Evaluation | None:
        """Evaluates the held-out split, or about `max_tokens` of it. Returns None if `stopped` ends the evaluation."""
        config, model, mesh = self._stepper.config, self._stepper.model, self._stepper.mesh
        sizes, isolate = (config.train.seq_len, config.train.micro_batch), config.data.isolate_documents
        try:
            with in_phase(Phase.EVALUATION):
                return mesh.together(lambda: evaluate(model, self._heldout, *sizes, isolate, mesh, max_tokens, stopped))
        except EvaluationStopped:
            return None

    def compare_replicas(self, position: Position, again: bool = False) -> ReplicaReport:
        """Compares the weights and moments of all replicas. Does nothing if `position` was already checked (unless `again`) or
        if train.check_replicas_every is 0."""
        stepper, optimizer = self._stepper, self._stepper.optimizer
        if not stepper.config.train.check_replicas_every or (self._checked == position and not again):
            return ReplicaReport()
        report = stepper.mesh.together(
            lambda: check_replicas(stepper.fused_params, stepper.mesh, optimizer.moments, optimizer.conflict)
        )
        if not report.mismatches and not report.not_finite:
            self._checked = position
        return report

    def marked(self, position: Position) -> Position:
        """The position as a checkpoint records it: with the current problem."""
        if self.trouble is None:
            return position
        ruined, text = self.trouble.ruined, self.trouble.text
        return replace(position, trouble=text if ruined else "", doubt="" if ruined else text)

    def proven(self) -> Path | None:
        """The newest checkpoint that is proven healthy; None if there is none. Raises OSError."""
        return self._saves.proven(self.proven_step)

    def begin_rollback(self, step: int) -> str:
        """Counts the requested rollback from `step`. Returns its reason."""
        reason, self.rollback_reason = self.rollback_reason, None
        # Resetting the count earlier would let the run fail at the same step forever.
        self.rollbacks = self.rollbacks + 1 if step <= self.furthest + PAST_TROUBLE else 1
        self.furthest = max(self.furthest, step)
        assert reason is not None, "a rollback was requested"
        return reason

    def rollback_target(self, reason: str) -> Path:
        """The newest proven checkpoint. Raises TrainingError if there is none, or after too many rollbacks."""
        # Only the main process searches, because others might see a folder while it is being renamed.
        target = run_on_main(self._stepper.mesh, self.proven, TrainingError)
        if target is None:
            raise TrainingError(f"{reason}; train.on_spike = 'rollback', but there is no proven checkpoint")
        if self.rollbacks > MAX_ROLLBACKS:
            raise TrainingError(
                f"{reason}; {MAX_ROLLBACKS} rollbacks did not help; resume from '{target}' with a lower optim.lr"
            )
        return target


_COUNTS = ("bad_steps", "proven_step", "rollbacks", "furthest")
