"""AdamW's groups and state."""

import pytest
import torch

from boost.models.fused import fused_params
from boost.optim.adamw import Optimizer, build_adamw
from tests import toy


@pytest.mark.parametrize("decay_on", ["all", "matrices"])
def test_decay_reaches_what_it_should(decay_on: str) -> None:
    config = toy.toy_config(optim={"weight_decay": 0.5, "lr": 0.1, "decay_on": decay_on})
    decoder, _ = toy.toy_decoder(config)
    before = {k: v.clone() for k, v in toy.weights(decoder).items()}
    optimizer = build_adamw(list(fused_params(decoder)), config.optim)
    for parameter in decoder.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, after in toy.weights(decoder).items():
        decayed = decay_on == "all" or (name.startswith("layers.") and not name.endswith("norm"))
        torch.testing.assert_close(after, before[name] * (0.95 if decayed else 1.0), msg=name)


def test_state_that_exists_from_the_start_changes_nothing() -> None:
    config = toy.toy_config()
    ours, _ = toy.toy_decoder(config)
    plain, _ = toy.toy_decoder(config)
    a = build_adamw(list(fused_params(ours)), config.optim)
    o = config.optim
    b = torch.optim.AdamW(plain.parameters(), o.lr, (o.beta1, o.beta2), o.eps, o.weight_decay)
    for _ in range(3):
        for decoder, optimizer in ((ours, a), (plain, b)):
            optimizer.zero_grad()
            decoder(*toy.toy_tokens(config)).backward()
            optimizer.step()
    assert toy.worst_error(toy.weights(ours), toy.weights(plain)) < 1e-10
    counted = Optimizer(a)
    counted.updates = 7
    assert {state["step"].item() for state in a.state.values()} == {7.0}
    counted.step(0, o.lr)
    assert counted.updates == 8 and {state["step"].item() for state in a.state.values()} == {8.0}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_an_update_launched_from_tensors_is_that_of_the_numbers(dtype: str) -> None:
    """Bitwise equal if gradients are not scaled. A skipped update changes neither weights nor moments nor counts."""
    config = toy.toy_config(dtype)
    models = [toy.toy_decoder(config)[0] for _ in range(2)]
    ours, usual = (Optimizer(build_adamw(list(fused_params(model)), config.optim)) for model in models)

    def gradients(factor: float) -> None:
        for model in models:
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, factor)

    def state() -> list[torch.Tensor]:
        return [x.clone() for x in (*models[0].parameters(), *ours.state_tensors())]

    def same() -> bool:
        pairs = [zip(*(model.parameters() for model in models), strict=True)]
        pairs.append(zip(ours.state_tensors(), usual.state_tensors(), strict=True))
        return all(torch.equal(a, b) for each in pairs for a, b in each) and ours.updates == usual.updates

    one, zero = torch.tensor(1.0), torch.tensor(0.0)
    for number in range(2):
        gradients(0.1 * (number + 1))
        ours.launch(0.01, one, zero)
        usual.step(number, 0.01)
        assert same()
    before = state()
    gradients(float("nan"))
    ours.launch(0.01, torch.tensor(float("nan")), one)
    assert ours.updates == 3
    ours.take_back()
    assert same() and all(torch.equal(a, b) for a, b in zip(state(), before, strict=True))
    gradients(0.5)
    ours.launch(0.01, torch.tensor(4.0), zero)
    gradients(0.125)
    usual.step(2, 0.01)
    assert same(), "a power of two divides exactly"
    gradients(0.5)
    ours.launch(0.01, torch.tensor(3.3, dtype=torch.float64), zero)
    gradients(0.5 / 3.3)
    usual.step(3, 0.01)
    close = {"rtol": 1e-14 if dtype == "float64" else 1e-6, "atol": 0.0}
    for ours_, theirs in zip(ours.state_tensors(), usual.state_tensors(), strict=True):
        torch.testing.assert_close(ours_, theirs, **close)
    ours.adamw.step()  # a launch leaves nothing behind that affects a plain step
