"""The model's hand-written functions: every GEMM, element-wise kernels, and the autograd functions that use them.

A `Kernel` is an element-wise or row-wise function that can run as one device kernel, which writes every result once. It has no
gradient: custom autograd functions call it in both passes. The backend is chosen once per process (`use`) from BACKENDS: "eager"
runs the operations one by one; "inductor" compiles each function into one device kernel with torch.compile. Inside
torch.compile, a `Kernel` becomes part of the compiled graph.

Legend: T tokens, D hidden width, R latent width of a group (all slots side by side), r of one slot, O local outputs of
a slot; B sequences, S tokens in each, H heads, E head width; V rows of a table of width D.
"""

import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from boost.config.traffic import statistic_dtype
from boost.models.fused import Identity
from boost.models.latents import Act

log = logging.getLogger("boost")

Result = TypeVar("Result")
Backend = Callable[["Kernel[Any]", tuple[object, ...]], Any]
"""Runs a kernel on its arguments."""


class Node(Protocol):
    """The autograd node that torch passes as `ctx`. The forward pass may set further attributes on it, for the backward pass."""

    saved_tensors: tuple[Any, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...
    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...
    def __getattr__(self, name: str) -> Any: ...
    def __setattr__(self, name: str, value: object) -> None: ...


class Kernel(Generic[Result]):
    """A function of tensors and constants that can run as one kernel in one pass."""

    def __init__(self, function: Callable[..., Result], reads: int = 1, dynamic: bool | None = True) -> None:
        """`reads`: how many times the kernel reads its inputs; a sum over rows in addition to a result per row takes one more.
        `dynamic`: True compiles once for all latent widths and numbers of tokens. None compiles for the first sizes, and again if
        others occur. It is faster, but unsuitable for sums: inductor would choose their kernels by timing, so runs would differ."""
        functools.update_wrapper(self, function)
        self.function, self.reads, self.dynamic, self.name = function, reads, dynamic, function.__name__
        KERNELS[self.name] = self

    def __call__(self, *arguments: object) -> Result:
        if _backend is _eager or torch.compiler.is_compiling():
            return self.function(*arguments)
        return _backend(self, arguments)


KERNELS: dict[str, Kernel[Any]] = {}
"""Kernels by name."""


def _eager(kernel: Kernel[Result], arguments: tuple[object, ...]) -> Result:
    return kernel.function(*arguments)


def _inductor(kernel: Kernel[Result], arguments: tuple[object, ...]) -> Result:
    # A dispatch mode is counting operations, and compiled code would hide them.
    if is_in_torch_dispatch_mode(include_infra_modes=False):
        return kernel.function(*arguments)
    return _compiled(kernel)(*arguments)


def _inductor_if_it_works(kernel: Kernel[Result], arguments: tuple[object, ...]) -> Result:
    try:
        return _inductor(kernel, arguments)
    except Exception as error:
        from torch._dynamo import exc  # importing this takes half a second

        if not isinstance(error, exc.TorchDynamoException | exc.FailOnRecompileLimitHit):
            raise
        reason = str(error).strip().split("\n")[0]
        log.warning("kernel '%s' cannot be compiled, so all kernels now run in eager mode: %s", kernel.name, reason)
        use("eager")
        return kernel.function(*arguments)


@functools.cache
def _compiled(kernel: Kernel[Result]) -> Callable[..., Result]:
    torch._dynamo.config.recompile_limit = 32  # default 8: sizes of 1 and each direction are compiled separately
    return torch.compile(kernel.function, fullgraph=True, dynamic=kernel.dynamic)


BACKENDS: dict[str, Backend] = {
    "eager": _eager,
    "inductor": _inductor,
    "inductor or eager": _inductor_if_it_works,
}
"""Backends by name. "inductor or eager" compiles, and falls back to eager with a warning if that fails. Other packages
may add their own backends, which may delegate to one of these."""

_backend: Backend = _eager


def use(name: str) -> None:
    """Chooses the backend for this process's kernels. Raises KeyError if there is no such backend."""
    global _backend
    _backend = BACKENDS[name]


@contextmanager
def using(backend: Backend) -> Iterator[None]:
    """Context manager in which kernels run on the given backend."""
    global _backend
    usual, _backend = _backend, backend
    try:
        yield
    finally:
        _backend = usual


# Building blocks of kernels.


STATISTIC_DTYPE = {
    getattr(torch, name): getattr(torch, statistic_dtype(name))
    for name in ("float16", "bfloat16", "float32", "float64")
}
"""Dtype of statistics, by that of the activations."""


def row_sum_of_squares(x_TD: Tensor) -> Tensor:
    """Sum of x^2 for each row, [T], in the statistic's dtype."""
    # vector_norm accumulates in the wider dtype without copying x to it.
    return torch.linalg.vector_norm(x_TD, dim=-1, dtype=STATISTIC_DTYPE[x_TD.dtype]).square()


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
    """<x, y> for each row, [T]: products in the operands' dtype, and their sum in `dtype`."""
    return (x * y).sum(-1, dtype=dtype)


# Kernels.


@Kernel
def activated(u_TU: Tensor, c_T1: Tensor, act: Act | None) -> Tensor:
    """Latents u -> h = act(c u), [T, H]; c [T, 1]."""
    z_TU = scaled(u_TU, c_T1)
    return z_TU if act is None else act.forward(z_TU)


@Kernel
def activated_backward(dh_TH: Tensor, u_TU: Tensor, c_T1: Tensor | None, act: Act | None) -> tuple[Tensor, Tensor]:
    """dh -> (du = c act'(c u) dh, h = act(c u)): recomputes h for the weight gradient."""
    z_TU = u_TU if c_T1 is None else scaled(u_TU, c_T1)
    du_TU = dh_TH if act is None else act.backward(dh_TH, z_TU)  # type: ignore[misc]
    du_TU = du_TU if c_T1 is None else scaled(du_TU, c_T1)
    return du_TU, z_TU if act is None else act.forward(z_TU)


@Kernel
def gated(gate_TO: Tensor, up_TO: Tensor) -> Tensor:
    """silu(gate) up (SwiGLU, arXiv 2002.05202)."""
    return F.silu(gate_TO).mul_(up_TO)


@Kernel
def gated_backward(dy_TO: Tensor, gate_TO: Tensor, up_TO: Tensor) -> tuple[Tensor, Tensor]:
    """dy -> (dgate = dy up silu'(gate), dup = dy silu(gate))."""
    return torch.ops.aten.silu_backward(dy_TO * up_TO, gate_TO), F.silu(gate_TO).mul_(dy_TO)


@functools.partial(Kernel, dynamic=None)
def rotated(x_BSHE: Tensor, cos_S1E: Tensor, sin_S1e: Tensor, direction: int) -> Tensor:
    """Rotary embedding in the rotate-half form, which pairs the two halves of a head: e = E / 2. `direction`: 1, or -1 for its
    gradient, the rotation by the opposite angle."""
    y_BSHE = x_BSHE * cos_S1E
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
    """<x, y> for each row, [T], in `dtype`."""
    return row_dot(x_TR, y_TR, dtype)


@Kernel
def normed(x_TD: Tensor, gamma_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMSNorm of whole rows -> (gamma x c, rounded to x's dtype once, c [T, 1])."""
    norm_T1 = torch.linalg.vector_norm(x_TD, dim=-1, keepdim=True, dtype=STATISTIC_DTYPE[x_TD.dtype])
    c_T1 = torch.rsqrt(norm_T1.square_().div_(x_TD.shape[-1]).add_(eps))
    y_TD = (x_TD * c_T1).mul_(gamma_D)
    return y_TD if y_TD.dtype == x_TD.dtype else y_TD.to(x_TD.dtype), c_T1


@functools.partial(Kernel, reads=2)
def normed_backward(dy_TD: Tensor, x_TD: Tensor, gamma_D: Tensor, c_T1: Tensor) -> tuple[Tensor, Tensor]:
    """dy -> (dx = c (g - x c^2 mean_j(g_j x_j)), g = gamma dy; dgamma = sum over rows of dy x c). Also for more dims of rows."""
    dy_TD = dy_TD.to(c_T1.dtype)
    normed_TD = x_TD * c_T1
    dgamma_D = (dy_TD * normed_TD).sum(tuple(range(dy_TD.dim() - 1))).to(gamma_D.dtype)
    g_TD = dy_TD * gamma_D.to(dy_TD.dtype)  # gamma may be stored in a wider dtype
    mean_T1 = torch.linalg.vecdot(g_TD, normed_TD).unsqueeze(-1) / x_TD.shape[-1]
    return g_TD.addcmul_(normed_TD, mean_T1, value=-1).mul_(c_T1).to(x_TD.dtype), dgamma_D


# Products. Code for other precisions or deferred weight gradients belongs here. `to` costs as much as a small operation even if
# there is nothing to convert, so it is called conditionally.

StartCollective = Callable[[Tensor], Tensor]
"""Starts a collective whose result has the shape of its operand. Call `wait` before using the result."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Differentiable x W^T (+ b), [..., I] x [O, I] -> [..., O], in x's dtype: master weights are cast here."""
    if bias is not None:
        bias = bias.to(x.dtype)
    return F.linear(x, weight if weight.dtype == x.dtype else weight.to(x.dtype), bias)


def gemm(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a b, [m, k] x [k, n], for hand-written forward and backward passes; a and b have the same dtype. `out`: the output
    tensor, which may be a view of some columns of a wider tensor."""
    return a @ b if out is None else torch.mm(a, b, out=out)


def gemms(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Products of pairs [m, k], [k, n], side by side: [m, sum of n]."""
    if len(pairs) == 1 or torch.compiler.is_compiling():  # compiled code writes the parts of a cat in place
        products = [gemm(a, b) for a, b in pairs]
        return products[0] if len(products) == 1 else torch.cat(products, dim=-1)
    (a, _), *_ = pairs
    widths = [b.shape[1] for _, b in pairs]
    made = a.new_empty(a.shape[0], sum(widths))
    for (a, b), part in zip(pairs, made.split(widths, dim=-1), strict=True):
        gemm(a, b, out=part)
    return made


class UpProject(torch.autograd.Function):
    """forward: u [T, U], c [T, 1] or None, B_k [O_k, r_k] -> y_k = h_k B_k^T [T, O_k], h = act(c u) [T, H], h_k its columns.
    dgrad: du = c act'(c u) dh, dh_k = dy_k B_k.
    wgrad: dB_k = dy_k^T h_k. No collective.

    There are `slots` results: B_k with k >= slots adds to result k - slots, and so on. The r_k add up to H; act is the identity
    (None) or has a backward; c is multiplied in before rounding. Saves u and c. The backward pass recomputes c u, h and the casts
    of B, which is element-wise work. c is a constant here: the node that sums u over processes computes c's gradient from u and du
    (`boost.layouts.btp`). `start_grad_sum` starts the sum of du, which stays in flight while the weight gradients are computed;
    only the node that produced u may consume that gradient, after waiting for it.
    """

    @staticmethod
    def forward(
        ctx: Node,
        u_TU: Tensor,
        c_T1: Tensor | None,
        act: Act | None,
        start_grad_sum: StartCollective | None,
        slots: int,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(u_TU, c_T1, *weights)
        ctx.act, ctx.start_grad_sum = act, start_grad_sum
        ends = itertools.accumulate(b_Or.shape[1] for b_Or in weights)
        ctx.columns = [slice(end - b_Or.shape[1], end) for end, b_Or in zip(ends, weights, strict=True)]
        h_TH = activated(u_TU, c_T1, act) if c_T1 is not None else u_TU if act is None else act.forward(u_TU)
        # Not a split: compiled code would save a split's results for the backward pass instead of recomputing h.
        parts = [h_TH[:, columns] for columns in ctx.columns] if len(weights) > 1 else [h_TH]
        first = zip(parts[:slots], weights, strict=False)
        made = [F.linear(h_Tr, b if b.dtype == u_TU.dtype else b.to(u_TU.dtype)) for h_Tr, b in first]
        for n in range(slots, len(weights)):
            made[n % slots].addmm_(parts[n], weights[n].to(u_TU.dtype).t())
        return tuple(made)

    @staticmethod
    def backward(ctx: Node, *dy: Tensor) -> tuple[Tensor | None, ...]:
        u_TU, c_T1, *weights = ctx.saved_tensors
        dy = dy * (len(weights) // len(dy))
        dh_TH = gemms([(dy_TO, b_Or.to(u_TU.dtype)) for dy_TO, b_Or in zip(dy, weights, strict=True)])
        if c_T1 is None and ctx.act is None:
            du_TU, h_TH = dh_TH, u_TU
        else:
            du_TU, h_TH = activated_backward(dh_TH, u_TU, c_T1, ctx.act)
        del dh_TH
        if ctx.start_grad_sum is not None:
            du_TU = ctx.start_grad_sum(du_TU)
        parts = [h_TH[:, columns] for columns in ctx.columns] if len(weights) > 1 else [h_TH]
        slots = zip(dy, parts, weights, strict=True)
        dw = [(dy_TO.t() @ h_Tr).to(b_Or.dtype) for dy_TO, h_Tr, b_Or in slots]
        return du_TU, None, None, None, None, *dw


def projected(h_TR: Tensor, weights: Sequence[Tensor] | Identity) -> Tensor:
    """Differentiable sum of h_k B_k^T, [T, O]: each B_k reads its columns of h."""
    if isinstance(weights, Identity):
        return F.pad(h_TR, list(weights)) if any(weights) else h_TR
    if len(weights) == 1:
        return linear(h_TR, weights[0])
    parts = h_TR.split([b_Or.shape[1] for b_Or in weights], dim=-1)
    y_TO = linear(parts[0], weights[0])
    for h_Tr, b_Or in zip(parts[1:], weights[1:], strict=True):
        y_TO = y_TO.addmm_(h_Tr, b_Or.to(h_Tr.dtype).t())
    return y_TO


def select(x_TI: Tensor, index_K: Tensor, first: int, gamma_I: Tensor | None = None) -> Tensor:
    """Differentiable (gamma x)[:, index], [T, K]. `first`: number of the first input here; those of other processes are 0, so that
    shapes do not depend on where they are."""
    local_K, width = index_K - first, x_TI.shape[-1]
    at_K, factor_K = local_K.clamp(0, width - 1), (local_K >= 0) & (local_K < width)
    if gamma_I is not None:
        factor_K = gamma_I.index_select(0, at_K) * factor_K
    return x_TI.index_select(-1, at_K) * factor_K.to(x_TI.dtype)


class _Lookup(torch.autograd.Function):
    """forward: tokens [T], table [V, D] -> rows [T, D]; wgrad: dtable [V, D] = sum of dy over the tokens of each row,
    accumulated in fp32 and rounded once. No collective.

    If accumulated in bf16, the gradient for a token that occurs a thousand times would stop growing after a few hundred.
    """

    @staticmethod
    def forward(ctx: Node, tokens_T: Tensor, table_VD: Tensor) -> Tensor:
        ctx.save_for_backward(tokens_T)
        ctx.rows, ctx.dtype = table_VD.shape[0], table_VD.dtype
        return F.embedding(tokens_T, table_VD)

    @staticmethod
    def backward(ctx: Node, dy_TD: Tensor) -> tuple[None, Tensor]:
        (tokens_T,) = ctx.saved_tensors
        dy_acc_TD = dy_TD.to(STATISTIC_DTYPE[dy_TD.dtype])
        return None, torch.ops.aten.embedding_dense_backward(dy_acc_TD, tokens_T, ctx.rows, -1, False).to(ctx.dtype)


def lookup(tokens_T: Tensor, table_VD: Tensor, dtype: torch.dtype) -> Tensor:
    """Differentiable lookup: rows [T, D] of a table, cast to `dtype`."""
    if table_VD.dtype == STATISTIC_DTYPE[table_VD.dtype]:
        return F.embedding(tokens_T, table_VD).to(dtype)
    rows: Tensor = _Lookup.apply(tokens_T, table_VD)
    return rows.to(dtype)


# Element-wise functions and norms. Each runs as one kernel in each pass and saves at most its inputs and one statistic per row.


class _GatedProduct(torch.autograd.Function):
    """forward: gate, up [T, O] -> y = silu(gate) up; dgrad: dgate = dy up silu'(gate), dup = dy silu(gate). No collective.

    Saves gate and up; the backward pass recomputes silu(gate).
    """

    @staticmethod
    def forward(ctx: Node, gate_TO: Tensor, up_TO: Tensor) -> Tensor:
        ctx.save_for_backward(gate_TO, up_TO)
        return gated(gate_TO, up_TO)

    @staticmethod
    def backward(ctx: Node, dy_TO: Tensor) -> tuple[Tensor, Tensor]:
        return gated_backward(dy_TO, *ctx.saved_tensors)


class _Rotary(torch.autograd.Function):
    """forward: q [B, S, H, E], k [B, S, K, E], cos [S, 1, E], sin [S, 1, E/2] -> both rotated; dgrad: dq, dk rotated by the
    opposite angles. No collective.

    Saves only the angles, which all blocks share.
    """

    @staticmethod
    def forward(ctx: Node, q_BSHE: Tensor, k_BSKE: Tensor, cos_S1E: Tensor, sin_S1e: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos_S1E, sin_S1e)
        return rotated(q_BSHE, cos_S1E, sin_S1e, 1), rotated(k_BSKE, cos_S1E, sin_S1e, 1)

    @staticmethod
    def backward(ctx: Node, dq_BSHE: Tensor, dk_BSKE: Tensor) -> tuple[Tensor, Tensor, None, None]:
        cos_S1E, sin_S1e = ctx.saved_tensors
        return rotated(dq_BSHE, cos_S1E, sin_S1e, -1), rotated(dk_BSKE, cos_S1E, sin_S1e, -1), None, None


def gated_product(gate_TO: Tensor, up_TO: Tensor, silu: bool) -> Tensor:
    """Differentiable silu(gate) up (SwiGLU, arXiv 2002.05202), or gate up."""
    if not silu:
        return gate_TO * up_TO
    if not torch.is_grad_enabled():
        return gated(gate_TO, up_TO)
    return _GatedProduct.apply(gate_TO, up_TO)


def rotary(q_BSHE: Tensor, k_BSKE: Tensor, cos_S1E: Tensor, sin_S1e: Tensor) -> tuple[Tensor, Tensor]:
    """Differentiable rotary embedding (arXiv 2104.09864) of queries and keys, in the rotate-half form, which pairs the two halves
    of a head."""
    if not torch.is_grad_enabled():
        return rotated(q_BSHE, cos_S1E, sin_S1e, 1), rotated(k_BSKE, cos_S1E, sin_S1e, 1)
    return _Rotary.apply(q_BSHE, k_BSKE, cos_S1E, sin_S1e)


class _Scale(torch.autograd.Function):
    """forward: x [T, D], c [T, 1] -> x c, rounded to x's dtype once; dgrad: dx = c dy, dc = <dy, x>. No collective."""

    @staticmethod
    def forward(ctx: Node, x_TD: Tensor, c_T1: Tensor) -> Tensor:
        ctx.save_for_backward(x_TD, c_T1)
        return activated(x_TD, c_T1, None)

    @staticmethod
    def backward(ctx: Node, dy_TD: Tensor) -> tuple[Tensor | None, Tensor | None]:
        if not ctx.needs_input_grad[1]:
            return activated(dy_TD, ctx.saved_tensors[1], None), None
        return scaled_backward(dy_TD, *ctx.saved_tensors)


def scale(x: Tensor, c_T1: Tensor) -> Tensor:
    """Differentiable x c, rounded to x's dtype once."""
    return _Scale.apply(x, c_T1)


class RMSNorm(torch.autograd.Function):
    """forward: x [T, D], gamma [D] -> y = gamma x c, c = 1 / sqrt(mean_j x_j^2 + eps) [T, 1] (arXiv 1910.07467).
    dgrad: dx = c (g - x c^2 mean_j(g_j x_j)), g = gamma dy.
    wgrad: dgamma = sum over T of dy x c. No collective.

    Saves x and c. Unlike torch's GPU kernel, it does not round the gains to x's dtype.
    """

    @staticmethod
    def forward(ctx: Node, x_TD: Tensor, gamma_D: Tensor, eps: float) -> Tensor:
        y_TD, c_T1 = normed(x_TD, gamma_D, eps)
        ctx.save_for_backward(x_TD, gamma_D, c_T1)
        return y_TD

    @staticmethod
    def backward(ctx: Node, dy_TD: Tensor) -> tuple[Tensor, Tensor, None]:
        return *normed_backward(dy_TD, *ctx.saved_tensors), None


class _SumOfSquares(torch.autograd.Function):
    """forward: [T, D] -> s = sum_j x_j^2, [T], fp32 or wider; dgrad: dx = 2 x ds. No collective."""

    @staticmethod
    def forward(ctx: Node, x_TD: Tensor) -> Tensor:
        ctx.save_for_backward(x_TD)
        return row_sum_of_squares(x_TD)

    @staticmethod
    def backward(ctx: Node, ds_T: Tensor) -> Tensor:
        (x_TD,) = ctx.saved_tensors
        return x_TD * (2 * ds_T).to(x_TD.dtype).unsqueeze(-1)


def rms_norm(x_TD: Tensor, gamma_D: Tensor, eps: float) -> Tensor:
    """Differentiable RMSNorm of whole rows, in x's dtype."""
    if not torch.is_grad_enabled():  # for one token, an autograd node costs more than the norm
        return normed(x_TD, gamma_D, eps)[0]
    return RMSNorm.apply(x_TD, gamma_D, eps)


def sum_of_squares(x_TD: Tensor) -> Tensor:
    """Differentiable sum of x^2 over the local width, [T], fp32 or wider."""
    return _SumOfSquares.apply(x_TD)
