"""LORO on one process, against the published algorithm on whole matrices and against the definition of its exact step."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from boost.config import Config
from boost.models.fused import fused_params
from boost.optim.adamw import build_optimizer
from boost.optim.loro import Loro, retract
from boost.parallel.mesh import Mesh
from tests import toy
from tests.trained import Trained

OPTIM = {"name": "loro", "exact_every": 3, "eps": 1e-6, "weight_decay": 0.0, "lr": 1e-2, "clip": 0.0}


def config_of(model: dict[str, Any] | None = None, **optim: Any) -> Config:
    return toy.toy_config(model={"family": "svd", "kv_heads": 8, **(model or {})}, optim={**OPTIM, **optim})


def published_exact(m: Tensor, n: Tensor, dm: Tensor, dn: Tensor, rate: float) -> tuple[Tensor, Tensor]:
    """The published algorithm on whole matrices [out, r], [in, r]: two QRs of the factors, two of the orthogonal components,
    and an SVD of 2r x 2r."""
    r = m.shape[1]
    u, rm = torch.linalg.qr(m)
    v, rn = torch.linalg.qr(n)
    z_m, z_n = dm @ torch.linalg.inv(rn), dn @ torch.linalg.inv(rm)
    k0 = z_n.mT @ v
    q2, k2 = torch.linalg.qr(z_m - u @ (u.mT @ z_m))
    q1, k1 = torch.linalg.qr(z_n - v @ (v.mT @ z_n))
    core = torch.cat(
        (
            torch.cat((rm @ rn.mT - rate * k0, -rate * k1.mT), dim=1),
            torch.cat((-rate * k2, torch.zeros_like(k2)), dim=1),
        )
    )
    left, s, right = torch.linalg.svd(core)
    root = s[:r].sqrt()
    return torch.cat((u, q2), dim=1) @ left[:, :r] * root, torch.cat((v, q1), dim=1) @ right.mT[:, :r] * root


class Reference:
    """The published loop over named tensors: Adam directions, bias correction in the learning rate, exact steps, refresh."""

    def __init__(self, weights: dict[str, Tensor], config: Config) -> None:
        self.weights = {name: value.clone() for name, value in weights.items()}
        self.config, self.count = config, 0
        self.refresh()

    def refresh(self) -> None:
        self.m = {name: torch.zeros_like(value) for name, value in self.weights.items()}
        self.v = {name: torch.zeros_like(value) for name, value in self.weights.items()}
        self.count = 0

    def step(self, number: int, gradients: dict[str, Tensor]) -> None:
        o, d = self.config.optim, self.config.model.dim
        self.count += 1
        rate = o.lr * math.sqrt(1 - o.beta2**self.count) / (1 - o.beta1**self.count)
        direction = {}
        for name, g in gradients.items():
            self.m[name] = o.beta1 * self.m[name] + (1 - o.beta1) * g
            self.v[name] = o.beta2 * self.v[name] + (1 - o.beta2) * g * g
            direction[name] = self.m[name] / (self.v[name].sqrt() + o.eps)
        last = (number + 1) % o.exact_every == 0
        for name, w in self.weights.items():
            if not name.endswith((".A", ".B")):
                w -= rate * direction[name]
            elif not last:
                w -= rate * min(w.shape) / d * direction[name]
            elif name.endswith(".B"):
                other = name[:-1] + "A"
                m, n = published_exact(w, self.weights[other].mT, direction[name], direction[other].mT, rate)
                # The signs of an SVD's columns are arbitrary: each new column of B takes the sign of the old column that it
                # resembles most.
                alike = (w.mT @ m).gather(0, (w.mT @ m).abs().argmax(0, keepdim=True)).sign()
                self.weights[name], self.weights[other] = m * alike, (n * alike).mT
        if last:
            self.refresh()


MODELS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "ranks of their own": {"ranks": {"attn.q": 4, "attn.v": 12, "layers.1.mlp.up": 5, "mlp.down": 32}},
}


@pytest.mark.parametrize("model", MODELS)
def test_steps_are_the_published_algorithm(model: str) -> None:
    config = config_of(MODELS[model])
    trained = Trained(config, 0)
    reference = Reference(trained.initial, config)
    for number in range(7):
        trained.step(number)
        reference.step(number, trained.gradients[-1])
        assert toy.worst_error(toy.weights(trained.model), reference.weights) <= 1e-9, number


def test_exact_steps_follow_the_training_step_not_the_update_count() -> None:
    """Steps skipped because of a non-finite gradient still count."""
    trained = Trained(config_of(), 0)
    for number in (0, 3, 4):
        trained.step(number)
    assert trained.optimizer.updates == 3
    trained.step(5)
    assert trained.optimizer.updates == 0


def random_factor(rows: int, rank: int, seed: int) -> Tensor:
    return torch.randn(rows, rank, generator=torch.Generator().manual_seed(seed), dtype=torch.double)


@pytest.mark.parametrize("kind", ["zero column", "equal columns", "zero", "narrow", "all along three columns"])
def test_factors_without_full_rank(kind: str) -> None:
    """Compares against pseudo-inverses on whole matrices: finite, the same matrix, and columns beyond its rank are zero in
    both."""
    rows = 3 if kind == "narrow" else 20
    m, n = random_factor(rows, 6, 3), random_factor(30, 6, 4)
    dm, dn = random_factor(rows, 6, 5), random_factor(30, 6, 6)
    if kind == "zero column":
        m[:, 1] = 0
    elif kind == "equal columns":
        m[:, 1] = m[:, 0]
    elif kind == "zero":
        m.zero_()
    elif kind == "all along three columns":
        m = m[:, :3] @ random_factor(3, 6, 7)
        dm = m @ dm[:6]
    m_plus, n_plus = torch.linalg.pinv(m), torch.linalg.pinv(n)
    tangent = (dn @ m_plus).mT + dm @ n_plus - m @ m_plus @ dm @ n_plus
    u, s, vh = torch.linalg.svd(m @ n.mT - 0.1 * tangent, full_matrices=False)
    (q, x), (p, y) = (torch.linalg.qr(torch.cat(pair, dim=1)) for pair in ((m, dm), (n, dn)))
    new_m, new_n = (base @ new for base, new in zip((q, p), retract(x, y, 0.1), strict=True))
    torch.testing.assert_close(new_m @ new_n.mT, u[:, :6] * s[:6] @ vh[:6], rtol=1e-10, atol=1e-10)
    empty = (new_m == 0).all(0)
    assert torch.equal(empty, (new_n == 0).all(0))
    expected = {"narrow": 3, "all along three columns": 3}.get(kind, 6)
    assert int((~empty).sum()) == min(6, int((s > 1e-12 * s[0]).sum())) == expected


def test_decay_shrinks_factors_before_either_step() -> None:
    """With zero gradients only decay remains: W is multiplied by (1 - rate * decay)^2."""
    config = config_of(weight_decay=0.5, exact_every=2)
    decoder, _ = toy.toy_decoder(config)
    optimizer = build_optimizer(list(fused_params(decoder)), config, Mesh(toy.CPU))
    assert isinstance(optimizer, Loro)
    before = {name: value.clone() for name, value in toy.weights(decoder).items()}
    for number in range(2):
        for parameter in decoder.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step(number, 0.1)
        share = 0.95 ** (2 * number + 2)
        for name in before:
            if name.endswith(".B"):
                a, b = (toy.weights(decoder)[name[:-1] + factor] for factor in "AB")
                torch.testing.assert_close(
                    b @ a, share * before[name] @ before[name[:-1] + "A"], rtol=1e-10, atol=1e-12
                )
