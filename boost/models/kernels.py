"""Element-wise functions that can each run as one kernel in one pass: every input read once, every result written once.

A kernel has no gradient: custom autograd functions call it in both passes. The backend is chosen once per process (`use`) from
BACKENDS: "eager" runs the operations one by one, "inductor" compiles each function into one kernel with torch.compile. Inside
torch.compile, a kernel becomes part of the compiled graph.

Legend: T tokens, R latent width of a group, O local width; B sequences, S tokens of each, H heads, E width of a head.
"""

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

log = logging.getLogger("boost")

Backend = Callable[["Kernel", tuple[Any, ...]], Any]
"""Runs a kernel on its arguments."""


class Kernel:
    """A function of tensors and constants that can run as one kernel in one pass."""

    def __init__(self, function: Callable[..., Any], reads: int = 1) -> None:
        """`reads`: how often it reads its inputs: one more if it returns a sum over rows in addition to a result per row."""
        functools.update_wrapper(self, function)
        self.function, self.reads = function, reads
        self.traced = function
        """What becomes part of a compiled graph. Compiled by torch 2.11, a custom autograd function has no gradients, without a
        word (2.13 has them), if its result is what an operation gave back of its operands: of an in-place operation, or of a `to`
        that changes nothing. Such a function needs another form here; a compiler saves the memory by itself."""
        self.name = function.__name__
        KERNELS[self.name] = self

    def __call__(self, *arguments: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.traced(*arguments)
        return _backend(self, arguments)


KERNELS: dict[str, Kernel] = {}
"""Kernels by name."""


def _eager(kernel: Kernel, arguments: tuple[Any, ...]) -> Any:
    return kernel.function(*arguments)


def _inductor(kernel: Kernel, arguments: tuple[Any, ...]) -> Any:
    # A dispatch mode is counting operations, which compiled code would hide.
    if is_in_torch_dispatch_mode(include_infra_modes=False):
        return kernel.function(*arguments)
    return _compiled(kernel)(*arguments)


def _inductor_if_it_works(kernel: Kernel, arguments: tuple[Any, ...]) -> Any:
    try:
        return _inductor(kernel, arguments)
    except RuntimeError as error:
        from torch._dynamo.exc import TorchDynamoException  # importing this takes half a second

        if not isinstance(error, TorchDynamoException):
            raise
        reason = str(error).strip().split("\n")[0]
        log.warning(
            "kernel '%s' cannot be compiled; all kernels run in eager mode from now on: %s", kernel.name, reason
        )
        use("eager")
        return kernel.function(*arguments)


@functools.cache
def _compiled(kernel: Kernel) -> Callable[..., Any]:
    """Compiles one kernel for all sizes: latent width differs between groups of a block, and the number of tokens differs in
    evaluation."""
    return torch.compile(kernel.function, fullgraph=True, dynamic=True)


BACKENDS: dict[str, Backend] = {
    "eager": _eager,
    "inductor": _inductor,
    "inductor or eager": _inductor_if_it_works,
}
"""Backends by name. "inductor or eager" compiles, and falls back to eager with a warning if that fails. Other packages may add
their own, which may delegate to one of these."""

_backend: Backend = _eager


def use(name: str) -> None:
    """Chooses the backend of this process's kernels from now on. Raises KeyError if there is no such backend."""
    global _backend
    _backend = BACKENDS[name]


@contextmanager
def using(backend: Backend) -> Iterator[None]:
    """Context in which kernels run on a given backend."""
    global _backend
    usual, _backend = _backend, backend
    try:
        yield
    finally:
        _backend = usual


# Building blocks of kernels.


def statistic_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of statistics: fp32, or fp64 for fp64 activations."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def row_sum_of_squares(x_TD: Tensor) -> Tensor:
    """Sum of x^2 of each row, [T], in the statistic's dtype."""
    # vector_norm accumulates in the wider dtype without copying x to it.
    return torch.linalg.vector_norm(x_TD, dim=-1, dtype=statistic_dtype(x_TD.dtype)).square()


def inverse_rms(s_T: Tensor, width: int, eps: float) -> Tensor:
    """1 / sqrt(s/d + eps), [T, 1], in the statistic's dtype."""
    return torch.rsqrt(s_T / width + eps).unsqueeze(-1)


def scaled(x: Tensor, c_T1: Tensor) -> Tensor:
    """x c, rounded to x's dtype once, in one pass; without a gradient."""
    if x.dtype == c_T1.dtype:
        return x * c_T1
    if torch.compiler.is_compiling():
        return (x * c_T1).to(x.dtype)
    return torch.mul(x, c_T1, out=torch.empty_like(x))


def row_dot(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """<x, y> of each row, [T]: products in the operands' dtype, their sum in `dtype`."""
    return (x * y).sum(-1, dtype=dtype)


# Kernels.


@Kernel
def activated(u_TR: Tensor, c_T1: Tensor | None, silu: bool) -> Tensor:
    """Latents u -> h = act(c u), [T, R]; c [T, 1] or None (1), act is SiLU or nothing."""
    z_TR = u_TR if c_T1 is None else scaled(u_TR, c_T1)
    return F.silu(z_TR) if silu else z_TR


@Kernel
def activated_backward(dh_TR: Tensor, u_TR: Tensor, c_T1: Tensor | None, silu: bool) -> tuple[Tensor, Tensor]:
    """dh -> (du = c act'(c u) dh, h = act(c u)): recomputes h for the weight gradient."""
    z_TR = u_TR if c_T1 is None else scaled(u_TR, c_T1)
    du_TR = torch.ops.aten.silu_backward(dh_TR, z_TR) if silu else dh_TR
    du_TR = du_TR if c_T1 is None else scaled(du_TR, c_T1)
    return du_TR, F.silu(z_TR) if silu else z_TR


@Kernel
def gated(gate_TO: Tensor, up_TO: Tensor) -> Tensor:
    """silu(gate) up (SwiGLU, arXiv 2002.05202)."""
    return F.silu(gate_TO).mul_(up_TO)


gated.traced = lambda gate_TO, up_TO: F.silu(gate_TO) * up_TO


@Kernel
def gated_backward(dy_TO: Tensor, gate_TO: Tensor, up_TO: Tensor) -> tuple[Tensor, Tensor]:
    """dy -> (dgate = dy up silu'(gate), dup = dy silu(gate))."""
    return torch.ops.aten.silu_backward(dy_TO * up_TO, gate_TO), F.silu(gate_TO).mul_(dy_TO)


@Kernel
def rotated(x_BSHE: Tensor, cos_SE: Tensor, sin_SE: Tensor) -> Tensor:
    """Rotary embedding in the rotate-half form, which pairs the two halves of a head."""
    return _rotate(x_BSHE, cos_SE, sin_SE, 1)


@Kernel
def rotated_backward(dy_BSHE: Tensor, cos_SE: Tensor, sin_SE: Tensor) -> Tensor:
    """Gradient of the rotary embedding: the rotation by the opposite angle."""
    return _rotate(dy_BSHE, cos_SE, sin_SE, -1)


def _rotate(x_BSHE: Tensor, cos_SE: Tensor, sin_SE: Tensor, direction: int) -> Tensor:
    half = x_BSHE.shape[-1] // 2
    sin_S1e = sin_SE.unsqueeze(-2)[..., :half]
    y_BSHE = x_BSHE * cos_SE.unsqueeze(-2)
    (x_1, x_2), (y_1, y_2) = x_BSHE.chunk(2, dim=-1), y_BSHE.chunk(2, dim=-1)
    y_1.addcmul_(x_2, sin_S1e, value=-direction)
    y_2.addcmul_(x_1, sin_S1e, value=direction)
    return y_BSHE


@Kernel
def scaled_backward(dy_TD: Tensor, x_TD: Tensor, c_T1: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x c: (c dy, <dy, x> [T, 1])."""
    return scaled(dy_TD, c_T1), row_dot(dy_TD, x_TD, c_T1.dtype).unsqueeze(-1)


@Kernel
def row_product(x_TR: Tensor, y_TR: Tensor, dtype: torch.dtype) -> Tensor:
    """<x, y> of each row, [T], in `dtype`."""
    return row_dot(x_TR, y_TR, dtype)


@Kernel
def normed(x_TD: Tensor, gamma_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMSNorm of whole rows -> (gamma x c, rounded to x's dtype once, c [T, 1])."""
    c_T1 = inverse_rms(row_sum_of_squares(x_TD), x_TD.shape[-1], eps)
    return (x_TD * c_T1).mul_(gamma_D).to(x_TD.dtype), c_T1


def _normed_traced(x_TD: Tensor, gamma_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    c_T1 = inverse_rms(row_sum_of_squares(x_TD), x_TD.shape[-1], eps)
    y_TD = x_TD * c_T1 * gamma_D
    return y_TD if y_TD.dtype == x_TD.dtype else y_TD.to(x_TD.dtype), c_T1


normed.traced = _normed_traced


@functools.partial(Kernel, reads=2)
def normed_backward(dy_TD: Tensor, x_TD: Tensor, gamma_D: Tensor, c_T1: Tensor) -> tuple[Tensor, Tensor]:
    """dy -> (dx = c (g - x c^2 mean_j(g_j x_j)), g = gamma dy; dgamma = sum over T of dy x c)."""
    dy_TD = dy_TD.to(c_T1.dtype)
    normed_TD = x_TD * c_T1
    dgamma_D = (dy_TD * normed_TD).sum(0).to(gamma_D.dtype)
    g_TD = dy_TD * gamma_D.to(dy_TD.dtype)  # gamma may be stored in a wider dtype
    mean_T1 = torch.linalg.vecdot(g_TD, normed_TD).unsqueeze(-1) / x_TD.shape[-1]
    return g_TD.addcmul_(normed_TD, mean_T1, value=-1).mul_(c_T1).to(x_TD.dtype), dgamma_D


# Differentiable functions of the model. Each saves only its inputs and runs as one kernel in either pass.


class _GatedProduct(torch.autograd.Function):
    """forward: gate, up [T, O] -> y = silu(gate) up; dgrad: dgate = dy up silu'(gate), dup = dy silu(gate). No collective.

    Saves gate and up; the backward pass recomputes silu(gate).
    """

    @staticmethod
    def forward(ctx: Any, gate_TO: Tensor, up_TO: Tensor) -> Tensor:
        ctx.save_for_backward(gate_TO, up_TO)
        return gated(gate_TO, up_TO)

    @staticmethod
    def backward(ctx: Any, dy_TO: Tensor) -> tuple[Tensor, Tensor]:
        return gated_backward(dy_TO, *ctx.saved_tensors)


class _Rotary(torch.autograd.Function):
    """forward: x [B, S, H, E], angles [S, E] -> x rotated; dgrad: dy rotated by the opposite angles. No collective.

    Saves only the angles, which all blocks share.
    """

    @staticmethod
    def forward(ctx: Any, x_BSHE: Tensor, cos_SE: Tensor, sin_SE: Tensor) -> Tensor:
        ctx.save_for_backward(cos_SE, sin_SE)
        return rotated(x_BSHE, cos_SE, sin_SE)

    @staticmethod
    def backward(ctx: Any, dy_BSHE: Tensor) -> tuple[Tensor, None, None]:
        return rotated_backward(dy_BSHE, *ctx.saved_tensors), None, None


def gated_product(gate_TO: Tensor, up_TO: Tensor, silu: bool) -> Tensor:
    """Differentiable silu(gate) up (SwiGLU, arXiv 2002.05202), or gate up."""
    if not silu:
        return gate_TO * up_TO
    if not torch.is_grad_enabled():
        y_TO: Tensor = gated(gate_TO, up_TO)
        return y_TO
    return _GatedProduct.apply(gate_TO, up_TO)


def rotary(x_BSHE: Tensor, cos_SE: Tensor, sin_SE: Tensor) -> Tensor:
    """Differentiable rotary embedding (arXiv 2104.09864) in the rotate-half form, which pairs the two halves of a head."""
    if not torch.is_grad_enabled():
        y_BSHE: Tensor = rotated(x_BSHE, cos_SE, sin_SE)
        return y_BSHE
    return _Rotary.apply(x_BSHE, cos_SE, sin_SE)
