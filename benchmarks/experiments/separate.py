"""Kernels as published code and autograd run them, for predicting published measurements: one operation after another, each saving
its inputs. Inside `separate_operations`, the planner traces them instead of its eager kernels.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from boost.config import traffic
from boost.models import kernels
from boost.models.kernels import Kernel
from boost.parallel.loss import logit_gradient, token_logits
from boost.plan.tracer import ONE_PASS, one_pass


@contextmanager
def separate_operations() -> Iterator[None]:
    """Context manager in which the planner prices uncompiled kernels like those of published code."""
    with mock.patch.dict(kernels.BACKENDS, eager=_run):
        yield


@contextmanager
def separate_loss() -> Iterator[None]:
    """Context manager in which the planner prices the loss as other software computes it: separate operations in chunks of 512
    tokens. The fitted numbers of profiles and stacks assume this."""
    chunks = mock.patch.multiple(traffic, CHUNK_ELEMENTS=1 << 23, CHUNK_TOKENS=512)
    with chunks, mock.patch.dict(kernels.BACKENDS, {ONE_PASS: _run_loss}):
        yield


def _run_loss(kernel: Kernel, arguments: tuple[Any, ...]) -> Any:
    is_loss = kernel in (token_logits, logit_gradient)
    return kernel.function(*arguments) if is_loss else one_pass(kernel, arguments)


def _run(kernel: Kernel, arguments: tuple[Any, ...]) -> Any:
    if kernel.name in ("normed", "normed_backward"):  # torch has fused kernels
        return one_pass(kernel, arguments)
    return getattr(_Operations, kernel.name, kernel.function)(*arguments)


class _Operations:
    """The operations of each kernel by name. See `boost.models.kernels` for the arguments."""

    @staticmethod
    def activated(u: Any, c: Any, act: Any) -> Any:
        z = (u * c).to(u.dtype)
        return z if act is None else act.forward(z)

    @staticmethod
    def activated_backward(dh: Any, u: Any, c: Any, act: Any) -> Any:
        dz = dh if act is None else act.backward(dh, u)
        return (dz if c is None else (dz * c).to(u.dtype)), u

    @staticmethod
    def gated(gate: Any, up: Any) -> Any:
        return F.silu(gate) * up

    @staticmethod
    def gated_backward(dy: Any, gate: Any, up: Any) -> Any:
        return torch.ops.aten.silu_backward(dy * up, gate), dy * gate

    @staticmethod
    def rotated(x: Any, cos: Any, sin: Any, direction: int) -> Any:
        x, cos, sin = x.transpose(1, 2), cos.squeeze(-2), torch.cat((sin, sin), dim=-1).squeeze(-2)
        if direction == 1:
            first, second = x.chunk(2, dim=-1)
            return (x * cos + torch.cat((-second, first), dim=-1) * sin).transpose(1, 2)
        first, second = (x * sin).chunk(2, dim=-1)
        return (x * cos + torch.cat((second, -first), dim=-1)).transpose(1, 2)

    @staticmethod
    def scaled_backward(dy: Any, x: Any, c: Any) -> Any:
        return (dy * c).to(x.dtype), (dy * x.to(c.dtype)).sum(-1).unsqueeze(-1)

    @staticmethod
    def row_product(x: Any, y: Any, dtype: torch.dtype) -> Any:
        return (x * y.to(dtype)).sum(-1)
