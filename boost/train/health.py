"""Training health: warns of spikes and divergence, marks checkpoints saved while they last, and optionally rolls back.

A step is in trouble if

- its loss or gradient norm is not finite (such a step changes no weights, `BadStep`);
- it has diverged: its cross-entropy (not the distillation loss, which may have any scale) is above DIVERGED x ln(vocabulary),
  where ln(vocabulary) is the cross-entropy of a uniform guess;
- it is a spike: its loss is more than train.spike_sigma standard deviations above the mean of the last WINDOW healthy steps. Half
  as many are enough if its gradient norm is more than train.spike_sigma deviations above the mean norm. Spikes are detected only
  after MIN_HEALTHY healthy steps. (In OLMo-core's SkipStepOptimizer, with 6 deviations and 128 steps, a high gradient norm alone
  is enough, but early in a run, many norms are high.)

Trouble ends after RECOVERED consecutive healthy steps. Until then, checkpoints are marked: with `Position.trouble` if the last step
was not finite or diverged, otherwise with `Position.doubt`, because the weights may be fine. While the mark is `trouble`, periodic
checkpoints are saved only if all existing ones have the same mark. A step's loss is computed before its update, so a healthy step
n + 1 proves that the checkpoint at step n is healthy. The newest proven checkpoint is never deleted. Checkpoints record recent
healthy steps, so a resumed run decides as an uninterrupted one would. All processes decide identically from the same statistics.
"""

import contextlib
import math
from collections import deque
from dataclasses import replace
from typing import Literal

from boost.text import JsonObject
from boost.train import checkpoint as ckpt
from boost.train.events import Rollback, RunTrouble, SaveStart, StepEnd, StepMetrics
from boost.train.hooks import Hook
from boost.train.loop import Trainer

WINDOW = 128
"""Number of recent healthy steps from which the mean and standard deviation are computed."""
MIN_HEALTHY = 32
"""Healthy steps required before a step can be a spike."""
FLOOR = 0.02
"""Minimum standard deviation, as a fraction of the mean, in case recent steps are almost equal."""
RECOVERED = 8
"""Number of consecutive healthy steps after which training has recovered."""
DIVERGED = 1.5
"""A cross-entropy above this multiple of ln(vocabulary) is worse than that of an untrained model."""

Trouble = Literal["not finite", "diverged", "spike"]


class SpikeDetector:
    """Judges steps by the mean and standard deviation of the loss and gradient norm of recent healthy steps."""

    def __init__(self, sigma: float, vocab_size: int) -> None:
        """`sigma`: standard deviations above the mean beyond which a step is a spike; 0 disables spike detection."""
        self._sigma, self._ceiling = sigma, DIVERGED * math.log(vocab_size)
        self._recent: dict[str, deque[float]] = {"loss": deque(maxlen=WINDOW), "gradient_norm": deque(maxlen=WINDOW)}

    def state(self) -> dict[str, list[float]]:
        """Loss and gradient norm for each recent healthy step."""
        return {name: list(values) for name, values in self._recent.items()}

    def take_state(self, state: dict[str, list[float]]) -> None:
        """Inverse of `state`."""
        for name, values in self._recent.items():
            values.clear()
            values.extend(state.get(name, ()))

    def judge(self, metrics: StepMetrics, skipped: bool) -> tuple[Trouble, str] | None:
        """Returns (kind, one-line description) for a step in trouble. Adds a healthy step to the window and returns None."""
        if skipped:
            return "not finite", f"loss {metrics.loss}, gradient norm {metrics.gradient_norm}"
        name, value = "cross-entropy", metrics.cross_entropy
        if value is None:
            name, value = "loss", metrics.loss
        if value > self._ceiling:
            return "diverged", f"{name} {value:.4g} is above {self._ceiling:.4g}, {DIVERGED} x ln(vocabulary)"
        if len(self._recent["loss"]) >= MIN_HEALTHY and self._sigma:
            usual_norm, norm_limit = self._usual("gradient_norm", self._sigma)
            is_steep = metrics.gradient_norm > norm_limit
            sigma = self._sigma / 2 if is_steep else self._sigma
            usual, limit = self._usual("loss", sigma)
            if metrics.loss > limit:
                norm = f", with gradient norm {metrics.gradient_norm:.4g} (mean {usual_norm:.4g})" if is_steep else ""
                return "spike", (
                    f"loss {metrics.loss:.4g} is more than {sigma:g} standard deviations above the mean of the last "
                    f"{len(self._recent['loss'])} healthy steps (mean {usual:.4g}, limit {limit:.4g}){norm}"
                )
            # Clamp the norm, so that one huge value does not hide later spikes, but a lasting rise becomes normal.
            metrics = replace(metrics, gradient_norm=min(metrics.gradient_norm, norm_limit))
        for name, values in self._recent.items():
            values.append(getattr(metrics, name))
        return None

    def _usual(self, name: str, sigma: float) -> tuple[float, float]:
        """(mean of the recent healthy steps, limit: `sigma` deviations above it)."""
        values = self._recent[name]
        mean = sum(values) / len(values)
        deviation = math.dist(values, [mean] * len(values)) / math.sqrt(len(values))
        return mean, mean + sigma * max(deviation, FLOOR * mean)


class HealthMonitor(Hook):
    """Warns of spikes and divergence, marks checkpoints saved while they last, and requests rollbacks if configured."""

    def __init__(self, detector: SpikeDetector, rollback: bool) -> None:
        self._detector, self._rollback = detector, rollback
        self._healthy = 0
        self._owes_save = False
        """Whether a checkpoint came due before training recovered, so that an unmarked one is saved afterwards."""

    def on_train_start(self, trainer: Trainer) -> None:
        if not any(self._detector.state().values()):  # a process that joins later has received another's state
            self._detector.take_state(trainer.position.recent)

    def after_step(self, trainer: Trainer, event: StepEnd) -> None:
        if event.empty:  # the loss of an empty step says nothing about the weights
            return
        judge, step, found = trainer.judge, event.metrics.step, self._detector.judge(event.metrics, event.skipped)
        if found is None:
            self._healthy += 1
            if judge.trouble is None:
                judge.proven_step = step - 1
            elif self._healthy < RECOVERED:
                judge.trouble = RunTrouble(judge.trouble.text, ruined=False)
            else:
                trainer.warn(f"training has recovered: steps {step - RECOVERED + 1} to {step} were normal")
                judge.trouble = None
                if self._owes_save:
                    self._owes_save = False
                    trainer.request_save()
            return
        kind, text = found[0], f"{found[0]} at step {step}: {found[1]}"
        self._healthy = 0
        if judge.trouble is None:
            proven = None
            with contextlib.suppress(OSError):  # only for the message
                proven = judge.proven()
            saved = f"the proven checkpoint '{proven}' is kept" if proven else "no checkpoint has been proven yet"
            trainer.warn(f"{text}; checkpoints are marked until training has recovered; {saved}")
        judge.trouble = RunTrouble(text, ruined=kind != "spike")
        # A non-finite step changes no weights. Only a second one in a row means that the weights are ruined.
        if self._rollback and (kind != "not finite" or judge.bad_steps > 1):
            judge.rollback_reason = text

    def before_save(self, trainer: Trainer, event: SaveStart) -> str | None:
        trainer.position = replace(trainer.position, recent=self._detector.state())
        trouble = trainer.judge.trouble
        if event.last or trouble is None:
            return None
        self._owes_save = True
        has_better = False
        with contextlib.suppress(OSError):
            has_better = any(not ckpt.marks_of(path)[0] for path in trainer.saves.complete())
        return trouble.text if trouble.ruined and has_better else None

    def state(self) -> JsonObject:
        return {"healthy": self._healthy, "owes_save": self._owes_save, "recent": self._detector.state()}

    def take_state(self, state: JsonObject) -> None:
        self._healthy, self._owes_save = state["healthy"], state["owes_save"]
        self._detector.take_state(state["recent"])

    def on_rollback(self, trainer: Trainer, event: Rollback) -> None:
        self._healthy, self._owes_save = 0, False
