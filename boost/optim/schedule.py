"""Learning rates as pure functions of the step: nothing to save, nothing to restore."""

import math

from boost.config.schema import OptimConfig

RESTART_FLOOR = 1e-6
"""Share of lr of the first step behind a restart, in the published code of LORO."""


def learning_rate(optim: OptimConfig, step: int, steps: int) -> float:
    """The rate of optimizer step `step` (0-based) of a run of `steps`.

    Warm-up is linear and reaches lr at step warmup_steps - 1, so that no step is wasted at rate 0. cosine then falls to
    min_lr_ratio * lr at the last step; constant stays until the last decay_steps steps, which fall linearly to the same.
    """
    if optim.schedule == "cosine-restarts":
        return optim.lr * _with_restarts(optim, step, steps)
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


def _with_restarts(optim: OptimConfig, step: int, steps: int) -> float:
    """LORO's published schedule as a share of lr: an envelope that dips to RESTART_FLOOR behind every restart.

    The envelope rises linearly from min_lr_ratio over the warm-up, to where the cosine is then; the cosine has its top at
    warmup_steps + restart_delay. Behind a restart the rate rises linearly, over restart_warmup_steps, to what the envelope is
    for the step at which it began: the published runs count restarts anew behind the warm-up, restart_delay later, and take the
    cosine of that count without the delay.
    """
    every, low = optim.exact_every, optim.min_lr_ratio
    span = max(1, steps - optim.warmup_steps)

    def cosine(position: float) -> float:
        return 0.5 * (1 + math.cos(math.pi * (position - optim.warmup_steps) / span))

    if step < optim.warmup_steps:
        top = cosine(optim.warmup_steps + optim.restart_delay)
        number, behind = divmod(step, every)
        envelope = low + (top - low) * step / optim.warmup_steps
        target = low + (top - low) * number * every / optim.warmup_steps
    else:
        position = step - optim.restart_delay
        number, behind = divmod(position, every)
        envelope = low + (1 - low) * cosine(position)
        target = low + (1 - low) * cosine(number * every)
    if number > 0 and behind < optim.restart_warmup_steps:
        return RESTART_FLOOR + (target - RESTART_FLOOR) * behind / optim.restart_warmup_steps
    return envelope
