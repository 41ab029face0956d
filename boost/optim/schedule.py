"""Learning rates as pure functions of the step, with no state to save or restore."""

import math
from functools import singledispatch

from boost.config.optimizers import Constant, Cosine, CosineRestarts, LRSchedule, OptimConfig

RESTART_FLOOR = 1e-6
"""Learning rate at the first step after a restart, as a fraction of lr, as in LORO's published code."""


def learning_rate(optim: OptimConfig, step: int, steps: int) -> float:
    """Learning rate for optimizer step `step` (0-based) in a run of `steps` steps."""
    return scheduled_rate(optim.lr_schedule, optim, step, steps)


@singledispatch
def scheduled_rate(schedule: LRSchedule, optim: OptimConfig, step: int, steps: int) -> float:
    """Learning rate under one schedule. Each schedule registers a function."""
    raise NotImplementedError(
        f"{type(schedule).__name__} defines no learning rate; register a function with scheduled_rate.register"
    )


@scheduled_rate.register
def _cosine(schedule: Cosine, optim: OptimConfig, step: int, steps: int) -> float:
    span = steps - 1 - optim.warmup_steps
    done = min((step - optim.warmup_steps) / span, 1.0) if span > 0 else 1.0
    return _warmed_up(optim, step, 0.5 * (1 + math.cos(math.pi * done)))


@scheduled_rate.register
def _constant(schedule: Constant, optim: OptimConfig, step: int, steps: int) -> float:
    left = steps - 1 - step
    return _warmed_up(optim, step, min(left / schedule.decay_steps, 1.0) if schedule.decay_steps else 1.0)


def _warmed_up(optim: OptimConfig, step: int, share: float) -> float:
    """Linear warmup, which reaches lr at step warmup_steps - 1, so no step has rate 0. After that, the rate is between
    min_lr_ratio * lr (share 0) and lr (share 1)."""
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    return optim.lr * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * share)


@scheduled_rate.register
def _with_restarts(schedule: CosineRestarts, optim: OptimConfig, step: int, steps: int) -> float:
    """LORO's published schedule: an envelope that drops to RESTART_FLOOR after every restart.

    During warmup, the envelope rises linearly from min_lr_ratio to the cosine's value at the end of the warmup. The cosine peaks
    at warmup_steps + restart_delay. After a restart, the rate rises linearly over restart_warmup_steps to the envelope's value
    at the step of the restart. As in the published runs, restarts after warmup come restart_delay steps later: they
    and the cosine are then computed from step - restart_delay.
    """
    cycle, low, delay = optim.exact_every, optim.min_lr_ratio, schedule.restart_delay
    span = max(1, steps - optim.warmup_steps)

    def cosine(position: float) -> float:
        return 0.5 * (1 + math.cos(math.pi * (position - optim.warmup_steps) / span))

    if step < optim.warmup_steps:
        top = cosine(optim.warmup_steps + delay)
        number, since = divmod(step, cycle)
        envelope = low + (top - low) * step / optim.warmup_steps
        target = low + (top - low) * number * cycle / optim.warmup_steps
    else:
        position = step - delay
        number, since = divmod(position, cycle)
        envelope = low + (1 - low) * cosine(position)
        target = low + (1 - low) * cosine(number * cycle)
    if number > 0 and since < schedule.restart_warmup_steps:
        return optim.lr * (RESTART_FLOOR + (target - RESTART_FLOOR) * since / schedule.restart_warmup_steps)
    return optim.lr * envelope
