"""Waits in a pipeline, for stages of equal length, are those of the schedules' papers."""

import pytest

from boost.config.load import from_tree
from boost.plan.timing import PassTime, _bubble

FORWARD, INPUTS, WEIGHTS = 1.0, 1.25, 0.75
"""Of one stage and micro-batch: forward pass, gradients of inputs, gradients of weights."""


@pytest.mark.parametrize(
    ("schedule", "virtual", "waits"),
    [
        ("gpipe", 1, FORWARD + INPUTS + WEIGHTS),  # arXiv 1811.06965
        ("1f1b", 1, FORWARD + INPUTS + WEIGHTS),  # 2006.09503
        ("interleaved-1f1b", 2, (FORWARD + INPUTS + WEIGHTS) / 2),  # 2104.04473
        ("zero-bubble", 1, FORWARD + INPUTS - WEIGHTS),  # 2401.10241, ZB-H1
    ],
)
def test_a_pipeline_waits_for_the_first_and_last_micro_batch(schedule: str, virtual: int, waits: float) -> None:
    pipeline = {"pp": 4, "schedule": schedule, "virtual": virtual}
    config = from_tree({"model": {"layers": 8}, "parallel": pipeline, "train": {"micro_batch": 1, "global_batch": 8}})
    passes = [PassTime(forward=FORWARD, backward=INPUTS + WEIGHTS, weight_gradients=WEIGHTS) for _ in range(4)]
    assert _bubble(config, passes, passes[0]) == pytest.approx(3 * waits)
