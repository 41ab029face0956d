"""Learning rates as pure functions of the step: nothing to save, nothing to restore."""

import math

from boost.config.schema import OptimConfig


def learning_rate(optim: OptimConfig, step: int, steps: int) -> float:
    """The rate of optimizer step `step` (0-based) of a run of `steps`.

    Warm-up is linear and reaches lr at step warmup_steps - 1, so that no step is wasted at rate 0. cosine then falls to
    min_lr_ratio * lr at the last step; constant stays until the last decay_steps steps, which fall linearly to the same.
    """
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    if optim.schedule == "cosine":
        span = steps - 1 - optim.warmup_steps
        done = min((step - optim.warmup_steps) / span, 1.0) if span > 0 else 1.0
        share = 0.5 * (1 + math.cos(math.pi * done))
    else:
        left = steps - 1 - step
        share = min(left / optim.decay_steps, 1.0) if optim.decay_steps else 1.0
    return optim.lr * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * share)
