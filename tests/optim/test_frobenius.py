"""Frobenius decay on one process, against autograd of the dense expression."""

import torch

from boost.models.fused import fused_params
from boost.optim.build import build_optimizer
from boost.parallel.mesh import Mesh
from tests import toy


def test_decay_is_the_gradient_of_half_the_squared_norm_of_each_product() -> None:
    optim = {"frobenius_decay": 0.7, "weight_decay": 0.3, "lr": 0.1}
    config = toy.toy_config(model={"ranks": {"attn.k": 5}}, optim=optim)
    decoder, _ = toy.toy_decoder(config)
    before = {name: value.clone().requires_grad_() for name, value in toy.weights(decoder).items()}
    names = [name for name in before if name.endswith(".B")]
    assert len(names) == 14
    penalty = sum(0.5 * 0.7 * (before[name] @ before[name[:-1] + "A"]).square().sum() for name in names)
    factors = [name[:-1] + factor for name in names for factor in "AB"]
    gradients = dict(zip(factors, torch.autograd.grad(penalty, [before[name] for name in factors]), strict=True))  # type: ignore[arg-type]
    for parameter in decoder.parameters():
        parameter.grad = torch.zeros_like(parameter)
    build_optimizer(list(fused_params(decoder)), config, Mesh(toy.CPU)).step(0, 0.1)
    for name, after in toy.weights(decoder).items():
        expected = before[name] - 0.1 * gradients[name] if name in gradients else before[name] * (1 - 0.1 * 0.3)
        torch.testing.assert_close(after, expected.detach(), rtol=1e-12, atol=1e-14, msg=name)
