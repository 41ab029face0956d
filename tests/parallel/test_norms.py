"""The statistic that is sent with the latents keeps all of its digits."""

import torch

from boost.parallel.norms import Measured, OnlineSum, _packed
from tests import toy
from tests.distributed import run_distributed


def summed(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """This process's statistic, and the sum over all processes."""
    axis = toy.mesh(tp=2).tp
    s_T = torch.rand(64, generator=torch.Generator().manual_seed(axis.rank)) * 1000
    u_TR = torch.ones(64, 3, dtype=dtype)
    payload = torch.cat((u_TR.reshape(-1), _packed(s_T, dtype, axis)))
    return s_T, OnlineSum(Measured(u_TR, s_T, payload), (), axis, width=3, eps=1e-6).wait()[1]


def test_a_statistic_is_summed_in_fp32_among_bf16_latents() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        (first, sums), (second, others) = run_distributed(2, summed, dtype)
        assert torch.equal(sums, others)
        torch.testing.assert_close(sums, first + second, rtol=2**-22, atol=0)
