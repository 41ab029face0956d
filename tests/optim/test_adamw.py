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
