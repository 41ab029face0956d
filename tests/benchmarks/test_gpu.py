"""The measurements of benchmarks/gpu, on fake devices."""

import importlib
from typing import Any
from unittest import mock

import pytest
import torch

from boost.measure import steps
from boost.parallel.mesh import Mesh
from tests import toy

kernels, shares = (importlib.import_module(f"benchmarks.gpu.{name}") for name in ("kernels", "shares"))
GPU = torch.device("cuda", 0)


def test_kernels_are_timed_between_events_around_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call between two synchronizations would mostly be its launch."""
    log: list[str] = []
    monkeypatch.setattr(kernels, "synchronize", lambda device: log.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: log.append("sleep"))
    monkeypatch.setattr(kernels, "now", lambda device: log.append("event"))
    monkeypatch.setattr(kernels, "seconds_between", lambda begun, end: 1.0)
    found = kernels.seconds(lambda: log.append("call"), GPU)
    assert found == 1 / kernels.CALLS
    assert log[3:] == ["synchronize", "sleep", "event", *["call"] * kernels.CALLS, "event"] * kernels.ROUNDS


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
