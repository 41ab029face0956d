"""Every peer is a correct contender: from the same weights, its loss, gradient norm and steps match our model."""

from typing import Any

import pytest

from benchmarks.experiments.peers import HF, of_family, peers
from boost.config import Config
from boost.measure.steps import Stepper
from boost.parallel.mesh import Mesh
from tests import toy
from tests.distributed import run_distributed


def ours(config: Config, steps: int) -> list[tuple[float, float]]:
    """(mean loss, gradient norm) before each step, on one process."""
    stepper, found = Stepper(toy.single(config), Mesh(toy.CPU)), []
    for _ in range(steps):
        stepper.step()
        assert stepper.stats is not None
        found.append((stepper.stats.loss, stepper.stats.gradient_norm))
    return found


def all_peers(config: Config, tp: int, steps: int) -> tuple[dict[str, list[tuple[float, ...]]], dict[str, str]]:
    """The same for every peer, starting with its second step; `peers` runs the first one."""
    mesh = toy.mesh(tp=tp) if tp > 1 else Mesh(toy.CPU)
    calls, reasons = peers(config, mesh)
    return {name: [tuple(float(x) for x in call()) for _ in range(steps)] for name, call in calls.items()}, reasons


def make(dtype: str = "float32", **model: Any) -> Config:
    # A clip that bites, and a rate at which a wrong update shows.
    return toy.toy_config(dtype, model=model, optim={"lr": 1e-2, "clip": 0.1, "weight_decay": 0.1})


@pytest.mark.nightly
def test_two_processes() -> None:
    pytest.importorskip("transformers")
    config = make(layers=1)
    expected = ours(of_family(config, "dense"), 2)[1:]
    for found, reasons in run_distributed(2, all_peers, config, 2, 1):
        assert reasons == {}
        for (loss, norm), (our_loss, our_norm) in zip(found[HF], expected, strict=True):
            assert loss == pytest.approx(our_loss, rel=1e-5)
            assert norm == pytest.approx(our_norm, rel=1e-4)


def test_one_process() -> None:
    pytest.importorskip("transformers")
    config = make(family="dense")
    found, reasons = all_peers(config, 1, 1)
    assert reasons == {}
    assert found[HF][0] == pytest.approx(ours(config, 2)[1], rel=1e-5)
