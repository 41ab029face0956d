"""Steps that are timed."""

from typing import Any
from unittest import mock

import torch

from boost.measure import steps
from boost.parallel.mesh import Mesh
from boost.train.graphs import WARM_UP, CapturedPasses
from tests import toy
from tests.recorded import recorded_graphs


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


def test_a_graph_hides_nothing_of_a_step() -> None:
    """Also on a GPU, where tests/softgpu compares the memory of its pool with the prediction."""
    config = toy.toy_config("float32")
    with recorded_graphs() as made:
        plain, captured = (
            steps.Stepper(config.changed(train={"cuda_graphs": graphs}), Mesh(toy.CPU)) for graphs in ("off", "on")
        )
        for stepper in (plain, captured):
            for _ in range(WARM_UP + 1):
                stepper.step()
        expected, seen = steps.look_at(plain), steps.look_at(captured)
        assert (seen.peak_bytes, seen.collectives) == (expected.peak_bytes, expected.collectives)
        captured.step()
    assert isinstance(captured._training.run_passes, CapturedPasses) and made[0].replays == 2


def test_a_step_of_compiled_blocks_is_observed_uncompiled() -> None:
    """torch >= 2.13 compiles no whole block while collectives and memory are recorded."""
    plain, compiled = (
        steps.look_at(steps.Stepper(toy.toy_config(train={"compile": part}), Mesh(torch.device("cpu"))))
        for part in ("none", "blocks")
    )
    assert compiled.peak_bytes == plain.peak_bytes > 0
