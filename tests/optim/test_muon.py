"""Muon on one process matches torch.optim.Muon on each whole factor, without its bf16."""

from typing import Any

import pytest
import torch
from torch.optim import _muon
from torch.overrides import TorchFunctionMode

from boost.config import Config
from boost.config.optimizers import MuonConfig
from boost.optim import muon
from boost.optim.muon import COEFFICIENTS, EPSILON, newton_schulz, without_tf32
from tests import toy
from tests.trained import Trained


def config_of(**optim: Any) -> Config:
    settings = {"name": "muon", "weight_decay": 0.1, "muon_lr": 0.02, **optim}
    return toy.toy_config(model={"family": "cola", "kv_heads": 1, "ranks": {"attn.q": 4}}, optim=settings)


def test_constants_are_torchs() -> None:
    assert COEFFICIENTS == (_muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C)
    defaults = torch.optim.Muon([torch.zeros(2, 2)]).defaults
    optim = MuonConfig()
    ours = (optim.muon_momentum, optim.muon_nesterov, optim.muon_steps, EPSILON)
    assert ours == tuple(defaults[key] for key in ("momentum", "nesterov", "ns_steps", "eps"))


def torchs(config: Config, initial: dict[str, torch.Tensor]) -> tuple[dict[str, torch.nn.Parameter], torch.optim.Muon]:
    """torch's Muon with each factor as a separate parameter."""
    o: Any = config.optim
    factors = {name: torch.nn.Parameter(w.clone()) for name, w in initial.items() if name.endswith((".A", ".B"))}
    options = {"momentum": o.muon_momentum, "nesterov": o.muon_nesterov, "ns_steps": o.muon_steps}
    adjust = None if o.muon_adjust == "original" else o.muon_adjust
    return factors, torch.optim.Muon(
        list(factors.values()), lr=o.muon_lr, weight_decay=o.weight_decay, adjust_lr_fn=adjust, **options
    )


def follow(config: Config, steps: int = 3) -> dict[str, float]:
    """Relative error (Frobenius) of our update of each factor against torch's, given our gradients."""
    trained = Trained(config, 0)
    factors, theirs = torchs(config, trained.initial)
    for number in range(steps):
        trained.step(number)
        for name, parameter in factors.items():
            parameter.grad = trained.gradients[-1][name].clone()
        theirs.step()
    ours = toy.weights(trained.model)
    return {name: ((ours[name] - w).norm() / (w - trained.initial[name]).norm()).item() for name, w in factors.items()}


class WithoutRounding(TorchFunctionMode):
    """Casts to bf16, which torch's Muon iterates in, copy instead."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.bfloat16 or (kwargs or {}).get("dtype") is torch.bfloat16:
            return args[0].clone()
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "options", [{}, {"muon_nesterov": False, "muon_adjust": "match_rms_adamw", "muon_steps": 3}], ids=str
)
def test_steps_are_torchs_without_its_rounding(options: dict[str, Any]) -> None:
    rounded = follow(config_of(**options))
    assert 1e-3 < max(rounded.values()) < 0.1, "torch iterates in bf16"
    with WithoutRounding():
        assert max(follow(config_of(**options)).values()) <= 1e-9


def test_iterating_on_the_gram_matrix_in_fp32_is_sound() -> None:
    """Singular values over six orders of magnitude, as a momentum may have. Far closer to fp64 than bf16, in which torch
    iterates."""
    generator = torch.Generator().manual_seed(0)
    u, _ = torch.linalg.qr(torch.randn(256, 64, generator=generator, dtype=torch.double))
    v, _ = torch.linalg.qr(torch.randn(64, 64, generator=generator, dtype=torch.double))
    x = u * torch.logspace(0, -6, 64, dtype=torch.double) @ v.mT
    exact = x @ newton_schulz(x.mT @ x, 5)

    def error(of: torch.Tensor) -> float:
        return ((of.double() - exact).norm() / exact.norm()).item()

    x32 = x.float()
    ours = error(x32 @ newton_schulz(x32.mT @ x32, 5))
    theirs = error(_muon._zeropower_via_newtonschulz(x32, COEFFICIENTS, 5, EPSILON))
    assert ours < 1e-3 and theirs > 100 * ours, (ours, theirs)


def test_a_step_allows_no_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process-wide setting is restored, even after an error."""
    products = torch.backends.cuda.matmul
    before, seen = products.fp32_precision, []
    trained = Trained(config_of(), 0)

    def noted(gram_RR: torch.Tensor, steps: int) -> torch.Tensor:
        seen.append(products.fp32_precision)
        return newton_schulz(gram_RR, steps)

    monkeypatch.setattr(muon, "newton_schulz", noted)
    try:
        products.fp32_precision = "tf32"
        trained.step(0)
        assert set(seen) == {"ieee"} and products.fp32_precision == "tf32"
        with pytest.raises(ZeroDivisionError), without_tf32():
            _ = 1 / 0
        assert products.fp32_precision == "tf32"
    finally:
        products.fp32_precision = before
