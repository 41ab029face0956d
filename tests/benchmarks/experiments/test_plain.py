"""The plain modules match our model: same weights, same loss, same gradients."""

from typing import Any

import pytest
from torch import Tensor

from benchmarks.experiments.plain import FORMS, PlainDecoder, build_plain, mean_loss, plain_step
from boost.config import Config
from boost.measure.steps import Stepper
from boost.parallel.mesh import Mesh
from tests import toy

MODELS: list[dict[str, Any]] = [
    {"family": "dense"},
    {"family": "cola"},
    {"family": "cola", "mlp_silu": False, "ranks": {"attn.k": 4, "mlp": 12}},
    {"family": "svd"},
]


def gradients(module: PlainDecoder) -> dict[str, Tensor]:
    """Gradients by mathematical name."""
    found: dict[str, Tensor] = {}
    for weight, parameters in module.stored():
        assert weight.grad is not None
        parts = weight.grad.split([parameter.shape[0] for parameter in parameters])
        found |= {parameter.name: part for parameter, part in zip(parameters, parts, strict=True)}
    return found


@pytest.mark.parametrize("model", MODELS, ids=lambda model: "-".join(str(value) for value in model.values()))
def test_loss_and_gradients_are_ours(model: dict[str, Any]) -> None:
    config = toy.toy_config(model=model)
    tokens, targets = toy.toy_tokens(config)
    ours, _ = toy.toy_decoder(config)
    expected = ours(tokens, targets) / targets.numel()
    expected.backward()
    module = build_plain(config, toy.CPU)
    loss = mean_loss(module(tokens), targets)
    loss.backward()
    assert abs(loss.item() / expected.item() - 1) < 1e-10
    assert toy.worst_error(gradients(module), toy.gradients(ours)) < 1e-10


def test_crossings_are_refused() -> None:
    config = toy.toy_config(model={"family": "lax"})
    with pytest.raises(ValueError, match="only usual linears"):
        build_plain(config, toy.CPU)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("form", FORMS[1:])
def test_the_compiled_forms_take_the_same_step(form: str) -> None:
    config = toy.toy_config("float32")
    step, expected = plain_step(config, toy.CPU, form), plain_step(config, toy.CPU)
    for _ in range(2):
        for ours, theirs in zip(step(), expected(), strict=True):
            assert ours.item() == pytest.approx(theirs.item(), rel=1e-4)


def several_steps(config: Config) -> tuple[list[float], list[float]]:
    """Losses of the plain modules and of our model before each of three steps."""
    step, ours = plain_step(config, toy.CPU), Stepper(config, Mesh(toy.CPU))
    return [step()[0].item() for _ in range(3)], [ours.step()[0].item() for _ in range(3)]


@pytest.mark.parametrize(("decay_on", "clip"), [("all", 0.0), ("matrices", 0.01)])
def test_a_whole_step_is_ours(decay_on: str, clip: float) -> None:
    """Two micro-batches, an epsilon large enough that the gradient's scale matters, and a rate at which updates show."""
    optim = {"lr": 0.05, "eps": 0.01, "clip": clip, "decay_on": decay_on, "weight_decay": 0.5}
    config = toy.toy_config(optim=optim)
    theirs, expected = several_steps(config)
    assert expected[2] != expected[1] != expected[0]
    # torch adds 1e-6 to the norm that it divides by.
    assert theirs == pytest.approx(expected, rel=1e-7 if clip else 1e-10)
