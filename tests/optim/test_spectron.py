"""Spectron on one process against the algorithm written out on whole matrices (arXiv 2602.12429)."""

from typing import Any

import pytest
import torch
from torch import Tensor

from boost.config import Config
from boost.optim.spectron import spectral_norm
from tests import references, toy
from tests.trained import Trained

MODEL = {"family": "cola", "kv_heads": 2, "ranks": {"attn.q": 4, "kv": 6}}


def config_of(model: dict[str, Any] | None = None, **optim: Any) -> Config:
    settings = {"name": "spectron", "weight_decay": 0.1, "spectron_lr": 0.3, "spectron_power_steps": 900, **optim}
    return toy.toy_config(model={**MODEL, **(model or {})}, optim=settings)


def orthogonalized(m: Tensor, steps: int) -> Tensor:
    """Newton-Schulz iterations of a matrix with the coefficients of Muon."""
    x = m / m.norm()
    for _ in range(steps):
        g = x @ x.T
        x = 3.4445 * x + (-4.7750 * g + 2.0315 * g @ g) @ x
    return x


def residual(b: Tensor, alpha: float) -> Tensor:
    """B with the matrix of DLR's residual, from its function of the identity."""
    return references.projected(torch.eye(b.shape[1], dtype=b.dtype), b, alpha).T


def expected_weights(config: Config, trained: Trained) -> dict[str, Tensor]:
    """The published algorithm on each pair, given our gradients: W = B A."""
    o = config.optim
    found = {name: w.clone() for name, w in trained.initial.items() if name.endswith((".A", ".B"))}
    momentum = {name: torch.zeros_like(w) for name, w in found.items()}
    for gradients in trained.gradients:
        for name in [name.removesuffix(".A") for name in found if name.endswith(".A")]:
            a, b = f"{name}.A", f"{name}.B"
            for each in (a, b):
                momentum[each] = o.spectron_momentum * momentum[each] + (1 - o.spectron_momentum) * gradients[each]
                found[each] = found[each] * (1 - o.spectron_lr * o.weight_decay)
            norms = [torch.linalg.matrix_norm(w, 2) for w in (found[a], residual(found[b], config.model.dlr_alpha))]
            rho = o.spectron_lr / (sum(norms) + 1)
            for each in (a, b):
                found[each] = found[each] - rho * orthogonalized(momentum[each], o.spectron_steps)
    return found


@pytest.mark.parametrize(
    ("model", "optim"),
    [({}, {}), ({"family": "svd"}, {"spectron_steps": 3, "spectron_momentum": 0.5}), ({"dlr_alpha": 0.7}, {})],
    ids=str,
)
def test_steps_are_the_published_ones(model: dict[str, Any], optim: dict[str, Any]) -> None:
    config = config_of(model, **optim)
    trained = Trained(config, 3)
    ours = toy.weights(trained.model)
    for name, expected in expected_weights(config, trained).items():
        moved = (expected - trained.initial[name]).norm()
        assert (ours[name] - expected).norm() <= 1e-8 * moved, name


def largest_update(config: Config, steps: int = 4) -> float:
    """The largest spectral norm of a product's update in any step."""
    trained, largest = Trained(config, 0), 0.0
    for number in range(steps):
        before = {name: w.clone() for name, w in toy.weights(trained.model).items()}
        trained.step(number)
        after = toy.weights(trained.model)
        for name in [name.removesuffix(".A") for name in before if name.endswith(".A")]:
            change = after[f"{name}.B"] @ after[f"{name}.A"] - before[f"{name}.B"] @ before[f"{name}.A"]
            largest = max(largest, torch.linalg.matrix_norm(change, 2).item())
    return largest


def test_the_update_of_a_product_is_bounded() -> None:
    """By eta times what the iteration takes singular values to: at most 1.2. Muon's update at the same rate is not."""
    rate = 0.2
    optim = {"weight_decay": 0.0, "spectron_lr": rate}
    assert 0.3 * rate < largest_update(config_of(**optim, spectron_power_steps=20)) <= 1.21 * rate
    muon = {"name": "muon", "muon_lr": rate, "weight_decay": 0.0}
    assert largest_update(toy.toy_config(model=MODEL, optim=muon)) > 1.21 * rate


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_spectral_norm(dtype: torch.dtype) -> None:
    """20 iterations find the norm of a random matrix to a few percent, from below; of one with a gap, exactly."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(64, 16, generator=generator, dtype=torch.float64)
    exact = torch.linalg.matrix_norm(x, 2)
    gram = (x.T @ x).to(dtype)
    assert 0.95 * exact < spectral_norm(gram, 20) < (1 + 1e-6) * exact
    assert spectral_norm(gram, 999) == pytest.approx(exact.item(), rel=1e-6)
    gap = torch.diag(torch.tensor([1.0, 0.01, 9.0, 0.0], dtype=dtype))
    assert spectral_norm(gap, 20) == pytest.approx(3.0, rel=1e-6)
    assert spectral_norm(torch.zeros(4, 4, dtype=dtype), 20) == 0
