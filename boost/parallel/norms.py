"""RMSNorm across shards of the hidden dimension.

Legend: T tokens, D = d/p hidden width on this process, R latent width. The statistic s = sum of x^2 over the whole width
commutes with the linear map after the norm, A (gamma * x) / sqrt(s/d + eps), so its terms can be sent with the partial sums A
x.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from boost.config.traffic import STATISTIC_TERMS
from boost.models.kernels import (
    activated,
    inverse_rms,
    normed,
    normed_backward,
    row_product,
    row_sum_of_squares,
    scaled_backward,
    statistic_dtype,
)
from boost.models.linear import gemm
from boost.parallel.collectives import begin_all_reduce, wait
from boost.parallel.mesh import Axis


class _Scale(torch.autograd.Function):
    """forward: x [T, D], c [T, 1] -> x c, rounded to x's dtype once; dgrad: dx = c dy, dc = <dy, x>. No collective."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, c_T1: Tensor) -> Tensor:
        ctx.save_for_backward(x_TD, c_T1)
        return activated(x_TD, c_T1, False)

    @staticmethod
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, Tensor | None]:
        if not ctx.needs_input_grad[1]:
            return activated(dy_TD, ctx.saved_tensors[1], False), None
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
    def forward(ctx: Any, x_TD: Tensor, gamma_D: Tensor, eps: float) -> Tensor:
        y_TD, c_T1 = normed(x_TD, gamma_D, eps)
        ctx.save_for_backward(x_TD, gamma_D, c_T1)
        return y_TD

    @staticmethod
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor, Tensor, None]:
        return *normed_backward(dy_TD, *ctx.saved_tensors), None


class _SumOfSquares(torch.autograd.Function):
    """forward: [T, D] -> s = sum_j x_j^2, [T], fp32 or wider; dgrad: dx = 2 x ds. No collective."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor) -> Tensor:
        ctx.save_for_backward(x_TD)
        return row_sum_of_squares(x_TD)

    @staticmethod
    def backward(ctx: Any, ds_T: Tensor) -> Tensor:
        (x_TD,) = ctx.saved_tensors
        return x_TD * (2 * ds_T).to(x_TD.dtype).unsqueeze(-1)


class _ProjectAndMeasure(torch.autograd.Function):
    """forward: x [T, D], A [R, D], gamma [D] -> u = x (A gamma)^T [T, R] and, if measuring, s = sum_j x_j^2 [T] and the flat
    payload (u, then s) that sums both over an axis; u is a view of it.
    dgrad: dx = du (A gamma) + 2 x ds.
    wgrad: dA = (du^T x) gamma, dgamma = sum over R of (du^T x) A. No collective.

    gamma scales columns of A instead of rows of x, and the backward pass recomputes A gamma, so only x is saved.
    """

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, a_RD: Tensor, gamma_D: Tensor, measured_over: Axis | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        ctx.save_for_backward(x_TD, a_RD, gamma_D)
        weight_DR = (a_RD * gamma_D).to(x_TD.dtype).t()
        if measured_over is None:
            return gemm(x_TD, weight_DR), None, None
        s_T = row_sum_of_squares(x_TD)
        u_TR, payload = _product_in_payload(x_TD, weight_DR, _packed(s_T, x_TD.dtype, measured_over))
        ctx.mark_non_differentiable(payload)
        return u_TR, s_T, payload

    @staticmethod
    def backward(
        ctx: Any, du_TR: Tensor, ds_T: Tensor | None, _: Any
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x_TD, a_RD, gamma_D = ctx.saved_tensors
        dx_TD = da_RD = dgamma_D = None
        # A pipeline may request input gradients and weight gradients in separate passes.
        if ctx.needs_input_grad[0]:
            dx_TD = gemm(du_TR, (a_RD * gamma_D).to(x_TD.dtype))
            if ds_T is not None:
                dx_TD.addcmul_(x_TD, (2 * ds_T).to(x_TD.dtype).unsqueeze(-1))
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            d_RD = gemm(du_TR.t(), x_TD).to(a_RD.dtype)
            da_RD, dgamma_D = d_RD * gamma_D, (d_RD * a_RD).sum(0)
        return dx_TD, da_RD, dgamma_D, None


class _StartSum(torch.autograd.Function):
    """forward: starts the sum of `payload` over processes -> (u, in-flight payload); one all-reduce. The payload holds the
    latents u [T, R] and the statistic s [T], or only u if s is already in flight in `carrier`.
    dgrad: waits for the sum of du that `_WaitForSum` started; ds = -c^2 / 2d <u, du>, c = (s/d + eps)^(-1/2), with u, s and du
    complete. ds is local, and exact for any function of c u.

    u is returned for the autograd graph only: its gradient has the shape of u, unlike the payload.
    """

    @staticmethod
    def forward(
        ctx: Any, u_TR: Tensor, s_T: Tensor, payload: Tensor, carrier: Tensor | None, axis: Axis, width: int, eps: float
    ) -> tuple[Tensor, Tensor]:
        started = begin_all_reduce(payload, axis)
        ctx.save_for_backward(started, carrier)
        ctx.tokens, ctx.axis, ctx.width, ctx.eps = s_T.numel(), axis, width, eps
        ctx.mark_non_differentiable(started)
        return u_TR.view_as(u_TR), started

    @staticmethod
    def backward(ctx: Any, du_TR: Tensor, _: Any) -> tuple[Tensor, Tensor, None, None, None, None, None]:
        started, carrier = ctx.saved_tensors
        du_TR = wait(du_TR)
        u, s_T = _unpacked(started if carrier is None else carrier, ctx.tokens, ctx.axis)
        u_TR = (u if carrier is None else started).view_as(du_TR)
        product_T = row_product(u_TR, du_TR, s_T.dtype)
        ds_T = product_T.mul_(inverse_rms(s_T, ctx.width, ctx.eps).squeeze(-1).square_()).mul_(-0.5 / ctx.width)
        return du_TR, ds_T, None, None, None, None, None


class _WaitForSum(torch.autograd.Function):
    """forward: waits for the payload that `_StartSum` started -> (u [T, R], s [T]), summed, views where possible.
    dgrad: starts the sum of du over processes, one all-reduce, unless `backward_started`. s has no gradient here: `_StartSum`
    computes it."""

    @staticmethod
    def forward(
        ctx: Any, u_TR: Tensor, started: Tensor, tokens: int, axis: Axis, backward_started: bool
    ) -> tuple[Tensor, Tensor | None]:
        ctx.axis, ctx.backward_started = axis, backward_started
        summed = wait(started)
        if not tokens:
            return summed.view_as(u_TR), None
        u, s_T = _unpacked(summed, tokens, axis)
        ctx.mark_non_differentiable(s_T)
        return u.view_as(u_TR), s_T

    @staticmethod
    def backward(ctx: Any, du_TR: Tensor, _: Any) -> tuple[Tensor, None, None, None, None]:
        return du_TR if ctx.backward_started else begin_all_reduce(du_TR, ctx.axis), None, None, None, None


class Measured(NamedTuple):
    """Partial latents with the statistic of their inputs."""

    u_TR: Tensor
    s_T: Tensor
    payload: Tensor
    """u and s as one flat tensor, to be summed over processes."""


class OnlineSum:
    """The sum over processes, in flight, of a group's partial latents and of the statistic that scales them.

    Each tensor of latents takes one all-reduce in either pass; the first one carries the statistic in the forward pass. The
    payload is flat: the elements of u, then s. In fp32 and fp64, s is T more elements. In bf16, a sum of rounded statistics
    would lose fp32's precision. So each process writes its s_i into its own slot as three bf16 terms that hold all 24 bits; the
    others add zeros, which is exact, and the p slots are summed in fp32: 3 p T more elements.
    """

    def __init__(
        self,
        measured: Measured,
        others: Sequence[Tensor],
        axis: Axis,
        width: int,
        eps: float,
        backward_started: bool = False,
    ) -> None:
        """`measured`, `others`: latents. `width`, `eps`: of the norm (`inverse_rms`). The caller must multiply the latents by
        the inverse RMS and use them for nothing else. `backward_started`: the consumer of the sums starts those of their
        gradients itself."""
        u_TR, s_T, payload = measured
        self._axis, self._tokens, self._backward_started = axis, s_T.numel(), backward_started
        first = _StartSum.apply(u_TR, s_T, payload, None, axis, width, eps)
        rest = [_StartSum.apply(u_TR, s_T, u_TR, first[1], axis, width, eps) for u_TR in others]
        self._started: list[tuple[Tensor, Tensor]] = [first, *rest]

    def wait(self) -> tuple[Tensor, ...]:
        """Returns (u, s, other latents), summed over processes."""
        (u_TR, started), *others = self._started
        first = _WaitForSum.apply(u_TR, started, self._tokens, self._axis, self._backward_started)
        return *first, *(_WaitForSum.apply(*each, 0, self._axis, self._backward_started)[0] for each in others)


def rms_norm(x_TD: Tensor, gamma_D: Tensor, eps: float) -> Tensor:
    """Differentiable RMSNorm of whole rows, in x's dtype."""
    if not torch.is_grad_enabled():  # a node costs more than the norm of one token
        y_TD: Tensor = normed(x_TD, gamma_D, eps)[0]
        return y_TD
    return RMSNorm.apply(x_TD, gamma_D, eps)


def sum_of_squares(x_TD: Tensor) -> Tensor:
    """Differentiable sum of x^2 over the local width, [T], fp32 or wider."""
    return _SumOfSquares.apply(x_TD)


def project(x_TD: Tensor, a_RD: Tensor, gamma_D: Tensor) -> Tensor:
    """Differentiable (gamma x) A^T over the local width."""
    return _ProjectAndMeasure.apply(x_TD, a_RD, gamma_D, None)[0]


def project_and_measure(x_TD: Tensor, a_RD: Tensor, gamma_D: Tensor, axis: Axis) -> Measured:
    """Differentiable (gamma x) A^T and sum of x^2 over the local width, to be summed over an axis."""
    return Measured(*_ProjectAndMeasure.apply(x_TD, a_RD, gamma_D, axis))


def _product_in_payload(x_TD: Tensor, weight_DR: Tensor, statistic: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (x W [T, R], flat payload). The payload holds the elements of x W, then the statistic; x W is a view of it."""
    if torch.compiler.is_compiling():  # compiled code writes the parts of a cat in place
        u_TR = gemm(x_TD, weight_DR)
        return u_TR, torch.cat((u_TR.reshape(-1), statistic))
    tokens, width = x_TD.shape[0], weight_DR.shape[1]
    payload = x_TD.new_empty(tokens * width + statistic.numel())
    u, rest = payload.split((tokens * width, statistic.numel()))
    rest.copy_(statistic)
    return gemm(x_TD, weight_DR, out=u.view(tokens, width)), payload


def _packed(s_T: Tensor, dtype: torch.dtype, axis: Axis) -> Tensor:
    """fp32 [T] -> [p, 3, T], flat, in `dtype`: zero except this process's slot, whose three terms sum to s exactly. Returns s
    itself if it already has this dtype."""
    if s_T.dtype == dtype:
        return s_T
    slots = torch.zeros(axis.size, STATISTIC_TERMS, s_T.numel(), dtype=dtype, device=s_T.device)
    rest = s_T
    for term in range(STATISTIC_TERMS):
        slots[axis.rank, term] = rest.to(dtype)
        rest = rest - slots[axis.rank, term].to(s_T.dtype)
    return slots.view(-1)


def _unpacked(summed: Tensor, tokens: int, axis: Axis) -> tuple[Tensor, Tensor]:
    """Summed payload -> (flat latents, statistic [T])."""
    wide = statistic_dtype(summed.dtype)
    slots = 1 if summed.dtype == wide else axis.size * STATISTIC_TERMS
    latents = summed.numel() - slots * tokens
    u, statistic = summed.split((latents, slots * tokens))
    return u, statistic if slots == 1 else statistic.view(slots, tokens).to(wide).sum(0)
