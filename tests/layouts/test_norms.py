"""The statistic that is sent with the latents keeps all of its digits."""

import torch

from boost.layouts.btp import StartSum, WaitForSum
from boost.models.kernels import row_sum_of_squares
from tests import toy
from tests.distributed import run_distributed


def summed(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """This process's statistic, and the sum over all processes."""
    axis = toy.mesh(tp=2).tp
    x_TD = (torch.randn(64, 5, generator=torch.Generator().manual_seed(axis.rank)) * 30).to(dtype)
    a_RD, gamma = torch.ones(3, 5, dtype=dtype), torch.ones(5, dtype=dtype)
    return row_sum_of_squares(x_TD), WaitForSum.apply(*StartSum.apply(x_TD, a_RD, gamma, axis, 10, 1e-6), axis, False)[
        1
    ]


def test_a_statistic_is_summed_in_fp32_among_bf16_latents() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        (first, sums), (second, others) = run_distributed(2, summed, dtype)
        assert torch.equal(sums, others)
        torch.testing.assert_close(sums, first + second, rtol=2**-22, atol=0)
