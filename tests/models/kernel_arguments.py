"""Arguments for every element-wise kernel."""

from typing import Any

import torch
from torch import Tensor

from boost.models.latents import ACTS
from boost.parallel.loss import logit_gradient, token_logits


def numbers(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def angles(tokens: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    half = torch.rand(tokens, 1, width // 2, generator=torch.Generator().manual_seed(1))
    cos = half.cos().to(dtype)
    return torch.cat((cos, cos), -1), half.sin().to(dtype)


def arguments(dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    """Arguments for every kernel, with sizes that are not powers of two."""
    u, c, x = (
        numbers(37, 24, dtype=dtype),
        numbers(37, 1, dtype=torch.promote_types(dtype, torch.float32)),
        (2, 37, 3, 16),
    )
    cos, sin = angles(37, 16, dtype)
    gamma = numbers(24, dtype=c.dtype)
    columns, mine, counted = torch.arange(37) % 24, torch.arange(37) % 3 > 0, torch.arange(37) % 5 > 0
    return {
        "activated": (u, c, ACTS["silu"]),
        "activated_backward": (u + 1, u, c, ACTS["silu"]),
        "gated": (u, u + 1),
        "gated_backward": (u + 2, u, u + 1),
        "rotated": (numbers(*x, dtype=dtype), cos, sin, -1),
        "normed_heads": (numbers(*x, dtype=dtype), numbers(2, 37, 1, 16, dtype=dtype), gamma[:16], gamma[8:], 1e-6),
        "scaled_backward": (u + 1, u, c),
        "row_product": (u, u + 1, c.dtype),
        "normed": (u, gamma, 1e-6),
        "normed_backward": (u + 1, u, gamma, c),
        token_logits.name: (u, columns, mine),
        logit_gradient.name: (u.clone(), c[:, 0], columns, mine, counted),
    }
