"""Training health: warns of spikes and divergence, avoids checkpoints of ruined weights, and optionally rolls back.

A step is in trouble if

- its loss or gradient norm is not finite (no weight changed, `BadStep`);
- it has diverged: its cross-entropy (not the loss of a distillation, which may have any scale) is above DIVERGED x ln(vocabulary),
  where ln(vocabulary) is that of a uniform guess;
- it is a spike: its loss or gradient norm is more than train.spike_sigma standard deviations above the mean of the last WINDOW
  healthy steps, as in OLMo-core's SkipStepOptimizer (6 deviations, 128 steps). This needs at least MIN_HEALTHY healthy steps.

Trouble ends after RECOVERED consecutive healthy steps; until then no periodic checkpoints are saved. The loss of a step is computed
before its update, so a healthy step n + 1 proves that the checkpoint of step n is healthy. The newest proven checkpoint is never
deleted. All processes see the same statistics and make the same decisions.
"""

import math
from collections import deque
from typing import TYPE_CHECKING, Any, Literal

from boost.train.hooks import Hook, Rollback, SaveStart, StepEnd
from boost.train.metrics import StepMetrics

if TYPE_CHECKING:
    from boost.train.loop import Trainer

WINDOW = 128
"""Number of recent healthy steps from which mean and standard deviation are computed."""
MIN_HEALTHY = 32
"""Healthy steps required before a step can be a spike."""
FLOOR = 0.02
"""Minimum standard deviation, as a fraction of the mean, for the case that recent steps are almost equal."""
RECOVERED = 8
"""Consecutive steps without trouble after which training has recovered."""
DIVERGED = 1.5
"""A cross-entropy above this many times ln(vocabulary) is worse than that of an untrained model."""

Trouble = Literal["not finite", "diverged", "spike"]


class SpikeDetector:
    """Detects spikes from the mean and standard deviation of the loss and gradient norm of recent healthy steps."""

    def __init__(self, sigma: float, vocab_size: int) -> None:
        """`sigma`: standard deviations above the mean beyond which a step is a spike; 0 disables spike detection."""
        self._sigma, self._ceiling = sigma, DIVERGED * math.log(vocab_size)
        self._recent: dict[str, deque[float]] = {"loss": deque(maxlen=WINDOW), "gradient_norm": deque(maxlen=WINDOW)}

    def state(self) -> dict[str, list[float]]:
        """Loss and gradient norm of recent healthy steps."""
        return {name: list(values) for name, values in self._recent.items()}

    def take_state(self, state: dict[str, list[float]]) -> None:
        """Inverse of `state`."""
        for name, values in self._recent.items():
            values.clear()
            values.extend(state[name])

    def judge(
        self, metrics: StepMetrics, skipped: bool, cross_entropy: float | None = None
    ) -> tuple[Trouble, str] | None:
        """Returns (kind, one-line description) for a step in trouble. Returns None for a healthy step and adds it to the window.
        `cross_entropy`: as of `StepEnd`."""
        if skipped:
            return "not finite", f"loss {metrics.loss}, gradient norm {metrics.gradient_norm}"
        name, value = ("loss", metrics.loss) if cross_entropy is None else ("cross-entropy", cross_entropy)
        if value > self._ceiling:
            return "diverged", f"{name} {value:.4g} is above {self._ceiling:.4g}, {DIVERGED} x ln(vocabulary)"
        if found := self._spike(metrics):
            return "spike", found
        for name, values in self._recent.items():
            values.append(getattr(metrics, name))
        return None

    def _spike(self, metrics: StepMetrics) -> str | None:
        for name, values in self._recent.items():
            if not self._sigma or len(values) < MIN_HEALTHY:
                continue
            mean = sum(values) / len(values)
            deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))
            limit, value = mean + self._sigma * max(deviation, FLOOR * mean), getattr(metrics, name)
            if value > limit:
                what = name.replace("_", " ")
                return (
                    f"{what} {value:.4g} is more than {self._sigma:g} standard deviations above the mean of the last "
                    f"{len(values)} steps ({mean:.4g}; limit {limit:.4g})"
                )
        return None


class HealthMonitor(Hook):
    """Warns of trouble, suspends periodic checkpoints while it lasts, and requests rollbacks if configured."""

    def __init__(self, detector: SpikeDetector, rollback: bool) -> None:
        self._detector, self._rollback = detector, rollback
        self._healthy = 0
        self._refused = False

    def after_step(self, trainer: "Trainer", event: StepEnd) -> None:
        if event.empty:  # its loss says nothing about the weights
            return
        step, found = event.metrics.step, self._detector.judge(event.metrics, event.skipped, event.cross_entropy)
        if found is None:
            self._recover(trainer, step)
            return
        kind, text = found[0], f"{found[0]} at step {step}: {found[1]}"
        self._healthy = 0
        if trainer.trouble is None:
            proven = trainer.proven_checkpoint()
            saved = f"'{proven}' is kept" if proven is not None else "there is no earlier checkpoint"
            trainer.warn(f"{text}; no periodic checkpoints until training has recovered, {saved}")
        trainer.begin_trouble(text, ruined=kind != "spike")
        # A non-finite step changes no weight. Only a second one in a row means that the weights are ruined.
        if self._rollback and (kind != "not finite" or trainer.bad_steps > 1):
            trainer.request_rollback(text)

    def before_save(self, trainer: "Trainer", event: SaveStart) -> str | None:
        if event.last or trainer.trouble is None:
            return None
        self._refused = True
        return trainer.trouble.text

    def state(self) -> dict[str, Any]:
        return {"healthy": self._healthy, "refused": self._refused, "recent": self._detector.state()}

    def take_state(self, state: dict[str, Any]) -> None:
        self._healthy, self._refused = state["healthy"], state["refused"]
        self._detector.take_state(state["recent"])

    def on_rollback(self, trainer: "Trainer", event: Rollback) -> None:
        self._healthy, self._refused = 0, False

    def _recover(self, trainer: "Trainer", step: int) -> None:
        self._healthy += 1
        if trainer.trouble is None:
            trainer.proven_step = step - 1
            return
        if self._healthy < RECOVERED:
            trainer.begin_trouble(trainer.trouble.text, ruined=False)
            return
        trainer.warn(f"training has recovered: {RECOVERED} steps without trouble up to step {step}")
        trainer.end_trouble()
        if self._refused:
            self._refused = False
            trainer.request_save()
