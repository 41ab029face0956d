"""One process of the wire experiment: layouts that do not compute the same are refused."""

import pytest
import torch

from benchmarks.experiments import wire_process
from benchmarks.experiments.results import MeasurementError
from boost.measure.steps import Stepper
from boost.parallel.mesh import Mesh
from tests import toy
from tests.benchmarks.experiments.groups import tiny


def test_layouts_of_one_model_must_have_one_loss() -> None:
    mesh = Mesh(toy.CPU)
    steppers = {
        "first": Stepper(tiny({"layout": "single"}, tp=1), mesh),
        "dense": Stepper(tiny({"layout": "single"}, "dense", tp=1), mesh),
        "again": Stepper(tiny({"layout": "btp"}, tp=1), mesh),
    }
    found = wire_process.first_losses(steppers)
    assert found["first"] == found["again"] != found["dense"]
    with torch.no_grad():
        for fused in steppers["again"].fused_params:
            fused.tensor.mul_(1.5)
    with pytest.raises(MeasurementError, match=r"^again has loss .*, other layouts .*: a bug in BOOST$"):
        wire_process.first_losses(steppers)
