"""A latent gate in steps, as a layout that shards latents runs it, against a single LayerNorm."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from boost.families.lax_gate import EPS, _ApplyNorm, _NormStats
from boost.models.group import LinearGroup
from tests import toy


def test_a_latent_far_from_zero_that_hardly_varies_stays_finite() -> None:
    """The variance is a difference of two large numbers and may come out negative."""
    decoder, _ = toy.toy_decoder(toy.toy_config(model={"family": "lax", "ranks": {"attn.v": 6}}))
    group, generator = decoder.blocks[1].qkv, torch.Generator().manual_seed(0)
    assert isinstance(group, LinearGroup) and group.mixer is not None
    mixer = group.mixer.double()
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter)
    mixed = 100 + 1e-3 * torch.randn(64, sum(mixer.widths), generator=generator)
    assert torch.isfinite(group.math.normalize(mixed, group.math.sums(mixed, mixer), mixer)).all()


def sharded(v: Tensor, w: Tensor, b: Tensor, shards: int) -> Tensor:
    """LayerNorm of [T, 2 R] as `shards` processes compute it, for two latents of width R."""
    width = v.shape[1] // 2 // shards
    parts = [torch.cat(each, dim=-1) for each in zip(*(half.split(width, -1) for half in v.chunk(2, -1)), strict=True)]
    sums = torch.stack([_NormStats.apply(part, (width, width)) for part in parts]).sum(0)
    found = []
    for i, part in enumerate(parts):
        rows = [torch.arange(width) + i * width + first for first in (0, v.shape[1] // 2)]
        own = torch.cat(rows)
        widths = ((width, width * shards),) * 2
        found.append(_ApplyNorm.apply(part, sums, w[own], b[own], widths).split(width, -1))
    return torch.cat([half for each in zip(*found, strict=True) for half in each], dim=-1)


def whole(v: Tensor, w: Tensor, b: Tensor, _: int) -> Tensor:
    """The same on one process."""
    return F.layer_norm(v.unflatten(-1, (2, -1)), (v.shape[1] // 2,), eps=EPS).flatten(1) * w + b


@pytest.mark.parametrize("ratio", [1.0, 1e3, 1e4])
@pytest.mark.parametrize("shards", [1, 2, 8])
def test_a_mean_far_above_the_deviation_costs_no_precision(ratio: float, shards: int) -> None:
    """In fp32, outputs and gradients are at most 10 times as far from the exact ones as those of torch's LayerNorm."""
    generator = torch.Generator().manual_seed(0)
    v = ratio + torch.randn(64, 128, generator=generator)
    v[::2] *= -1
    w, b, dy = (torch.randn(shape, generator=generator) for shape in ((128,), (128,), (64, 128)))

    def run(function: Any, dtype: torch.dtype) -> list[Tensor]:
        inputs = [x.to(dtype).requires_grad_() for x in (v, w, b)]
        y = function(*inputs, shards)
        return [y.detach(), *torch.autograd.grad(y, inputs, dy.to(dtype))]

    exact, usual, ours = run(whole, torch.float64), run(whole, torch.float32), run(sharded, torch.float32)
    for name, e, u, o in zip(("y", "dv", "dw", "db"), exact, usual, ours, strict=True):
        error, limit = ((x - e).norm() / e.norm() for x in (o, u))
        assert error <= 10 * limit + 1e-6, (name, float(error), float(limit))
    for e, o in zip(exact, run(sharded, torch.float64), strict=True):
        assert (o - e).norm() / e.norm() <= 1e-10 * max(1.0, ratio / 1e3) ** 2
