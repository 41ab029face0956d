"""act and B as one node: matches plain operations and saves only latents."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from boost.models.kernels import UpProject, scaled
from boost.models.latents import ACTS


def up_project(u_TR: Tensor, c_T1: Tensor | None, silu: bool, weights: list[Tensor]) -> list[Tensor]:
    return list(UpProject.apply(u_TR, c_T1, ACTS["silu" if silu else "none"], None, len(weights), *weights))


def plain(u_TR: Tensor, c_T1: Tensor | None, silu: bool, weights: list[Tensor]) -> list[Tensor]:
    z_TR = u_TR if c_T1 is None else (u_TR * c_T1).to(u_TR.dtype)
    h_TR = F.silu(z_TR) if silu else z_TR
    parts = h_TR.split([b.shape[1] for b in weights], dim=-1)
    return [F.linear(h, b.to(h.dtype)) for h, b in zip(parts, weights, strict=True)]


def operands(
    dtype: torch.dtype = torch.float64, ranks: tuple[int, ...] = (3, 2)
) -> tuple[Tensor, Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    stored = torch.float32 if dtype == torch.bfloat16 else dtype
    u = torch.randn(5, sum(ranks), generator=generator).to(dtype).requires_grad_()
    c = torch.rand(5, 1, generator=generator).to(stored)
    weights = [torch.randn(4 + r, r, generator=generator).to(stored).requires_grad_() for r in ranks]
    return u, c, weights


@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("is_scaled", [True, False])
@pytest.mark.parametrize("ranks", [(3, 2), (4,)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_it_is_the_plain_function(dtype: torch.dtype, ranks: tuple[int, ...], is_scaled: bool, silu: bool) -> None:
    u, c, weights = operands(dtype, ranks)
    results = []
    for function in (up_project, plain):
        ys = function(u, c if is_scaled else None, silu, weights)
        grads = torch.autograd.grad([y.sin().sum() for y in ys], [u, *weights])
        results.append([*ys, *grads])
    limit = 1e-12 if dtype == torch.float64 else 2**-6
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype
        assert (ours - theirs).norm() <= limit * theirs.norm()


def test_input_and_weight_gradients_in_separate_passes() -> None:
    u, c, weights = operands()
    loss = sum(y.sin().sum() for y in up_project(u, c, True, weights))
    (du,) = torch.autograd.grad(loss, [u], retain_graph=True)
    dw = torch.autograd.grad(loss, weights)
    expected = torch.autograd.grad(sum(y.sin().sum() for y in plain(u, c, True, weights)), [u, *weights])
    for ours, theirs in zip((du, *dw), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)


def test_only_the_latents_are_kept() -> None:
    u, c, weights = operands()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):  # type: ignore[func-returns-value]
        up_project(u, c, True, weights)
    assert {x.data_ptr() for x in kept} == {x.data_ptr() for x in (u, c, *weights)}


def test_a_scaled_row_is_rounded_once() -> None:
    x = torch.randn(64, 8).to(torch.bfloat16)
    c = torch.rand(64, 1)
    expected = (x.float() * c).to(torch.bfloat16)
    assert torch.equal(scaled(x, c), expected)
