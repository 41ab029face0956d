"""`LowRankLinear` on its own."""

from typing import Any

import pytest
import torch
from torch import nn

from boost.errors import ConfigError
from boost.nn import LowRankLinear


def dense(rank: int = 12, bias: bool = True) -> nn.Linear:
    """A linear of 12 x 20 whose weight has the given rank."""
    torch.manual_seed(0)
    linear = nn.Linear(12, 20, bias=bias, dtype=torch.float64)
    with torch.no_grad():
        u, s, v = torch.linalg.svd(linear.weight, full_matrices=False)
        linear.weight.copy_((u[:, :rank] * s[:rank]) @ v[:rank])
    return linear


def test_it_is_b_act_a_x() -> None:
    linear = LowRankLinear(12, 20, 4, activation="silu", bias=True, dtype=torch.float64)
    x = torch.randn(3, 5, 12, dtype=torch.float64)
    expected = nn.functional.silu(x @ linear.A.weight.T) @ linear.B.weight.T + linear.B.bias
    torch.testing.assert_close(linear(x), expected)
    assert (linear.in_features, linear.out_features, linear.rank) == (12, 20, 4)
    assert "activation=silu" in repr(linear)


@pytest.mark.parametrize("bias", [True, False])
def test_factors_of_a_matrix_of_low_rank_are_exact(bias: bool) -> None:
    linear = dense(rank=4, bias=bias)
    made = LowRankLinear.from_linear(linear, 4)
    x = torch.randn(7, 12, dtype=torch.float64)
    torch.testing.assert_close(made(x), linear(x), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(made.merged()(x), linear(x), rtol=1e-10, atol=1e-12)


def test_svd_is_the_closest_of_its_rank() -> None:
    linear = dense()
    made = LowRankLinear.from_linear(linear, 5)
    values = torch.linalg.svdvals(linear.weight)
    error = torch.linalg.norm(made.merged().weight - linear.weight)
    torch.testing.assert_close(error, values[5:].square().sum().sqrt(), rtol=1e-10, atol=0)


def test_initial_factors_keep_the_scale_of_colas_code() -> None:
    torch.manual_seed(0)
    made = LowRankLinear(400, 300, 100)
    for factor in (made.A, made.B):
        assert factor.weight.std().item() == pytest.approx(100**-0.25 * 700**-0.25, rel=0.02)


def test_random_factors_and_meta_tensors_need_no_svd() -> None:
    made = LowRankLinear.from_linear(nn.Linear(12, 20, device="meta"), 4)
    assert made.A.weight.is_meta and made.A.weight.shape == (4, 12)
    assert LowRankLinear.from_linear(dense(), 4, init="random").A.weight.std() > 0


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(ConfigError, match=r"rank = 13 .* 12 x 20 linear; nearest valid value: 12"):
        LowRankLinear(12, 20, 13)
    with pytest.raises(ConfigError, match=r"activation = 'relu' is unknown; valid values: none, silu"):
        LowRankLinear(12, 20, 4, activation="relu")
    with pytest.raises(ConfigError, match=r"init = 'qr' is unknown; valid values: svd, random"):
        LowRankLinear.from_linear(dense(), 4, init="qr")
    with pytest.raises(ConfigError, match="cannot be merged"):
        LowRankLinear(12, 20, 4, activation="silu").merged()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda factors: factors.A.register_forward_hook(lambda *_: None), "factor A has hooks"),
        (lambda factors: setattr(factors, "A", nn.Linear(12, 4)), "factor A has a bias"),
        (lambda factors: setattr(factors, "B", nn.Sequential(factors.B)), r"factor B is a torch\.nn.*Sequential"),
    ],
)
def test_a_merge_loses_nothing(change: Any, said: str) -> None:
    factors = LowRankLinear(12, 20, 4, bias=True)
    assert factors.merged().bias is not None
    change(factors)
    with pytest.raises(ConfigError, match=f"{said}.*; merge the adapter first"):
        factors.merged()
