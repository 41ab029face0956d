"""Steps that are timed."""

from typing import Any
from unittest import mock

from boost.measure import steps
from boost.parallel.mesh import Mesh
from tests import toy


def test_steps_are_launched_before_the_statistics_of_the_one_before_are_read() -> None:
    log: list[str] = []
    stepper = steps.Stepper.__new__(steps.Stepper)
    stepper.config, stepper.mesh, updates = toy.toy_config(), Mesh(toy.CPU), iter(range(9))
    training: Any = mock.Mock()
    training.passes.side_effect = lambda *_: log.append("passes")
    training.update.side_effect = lambda *_: next(updates)
    training.read.side_effect = lambda update: log.append(f"read {update}")
    stepper._training = training
    assert stepper.seconds(3) > 0
    assert log == ["passes", "passes", "read 0", "passes", "read 1", "read 2"]
