"""Runtime of `btp` (arXiv 2512.12131), and RMSNorm across shards of the hidden dimension. Shapes: `boost.layouts.btp.spec`.

One pair of autograd nodes sums over processes in both passes: partial latents in the forward pass, their gradients in the backward
pass. So all operations on latents receive partial gradients, and their parameters' gradients are reduced once per optimizer step.

Dividing by sqrt(s/d + eps), where the statistic s is the sum of x^2 over the whole width, commutes with the linear map after it,
A (gamma * x). Each process's share of s can therefore be sent with its partial sum of A (gamma * x) (`OnlineSum`).

Legend: p TP processes, T tokens, D = d/p hidden width on this process, R latent width of a group, s the statistic of RMSNorm.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from boost.config.schema import ModelConfig, ParallelConfig
from boost.config.traffic import STATISTIC_TERMS
from boost.layouts import LayoutSpec
from boost.layouts.runtime import BaseLayout
from boost.layouts.spec import GATHER, SUM_BOTH
from boost.models.group import Flow, Latents, LinearGroup
from boost.models.interface import NOTHING_IN_FLIGHT
from boost.models.kernels import (
    inverse_rms,
    linear,
    lookup,
    row_product,
    row_sum_of_squares,
    scale,
    sum_of_squares,
)
from boost.parallel import collectives
from boost.parallel.collectives import start_all_reduce, wait
from boost.parallel.mesh import Axis, Mesh


class BTP(BaseLayout):
    """Hidden-sharded residual stream and all-reduces of width r."""

    def __init__(
        self, spec: LayoutSpec, model: ModelConfig, parallel: ParallelConfig, mesh: Mesh, is_inference: bool = False
    ) -> None:
        super().__init__(spec, model, parallel, mesh, is_inference)
        self._start_grad_sum = functools.partial(start_all_reduce, axis=self.axis)
        """Starts summing the latents' gradient over processes, before the weight gradients are computed."""
        self._is_sync = parallel.norm == "sync"
        """Whether the norm's statistic has a separate all-reduce."""

    def embed(self, flow: Flow, table: Tensor, dtype: torch.dtype) -> tuple[None, ...]:
        """[T] -> [T, D]: each process looks up its own columns. No collective."""
        flow.x = lookup(flow.x, table, dtype)
        return NOTHING_IN_FLIGHT

    def enter(self, flow: Flow, gamma: Tensor, group: LinearGroup) -> Iterator[None]:
        """A norm(x), summed over processes: the latents and the statistic that scales them, which shares the first all-reduce.
        The norm is applied after A, to T x R elements."""
        flow.to_combine = flow.take(group.taken) if group.taken else ()
        if self._is_sync:
            yield from self._enter_sync(flow, gamma, group)
            return
        weights, dim, eps = group.inner_weights(group.A), self.model.dim, self.model.norm_eps
        sums = OnlineSum(flow.x, weights, gamma, self.axis, dim, eps, backward_started=group.saves_latents_only)
        yield
        flow.arrived = sums.wait()

    def project_in(self, arrived: Latents, prev: Latents, group: LinearGroup) -> tuple[Sequence[Tensor], Latents]:
        """act, then B for this process's heads or channels."""
        if self._is_sync:
            return group.outer(arrived, prev, None, self._start_grad_sum)
        u_TR, s_T, *others = arrived
        scale_T1 = inverse_rms(s_T, self.model.dim, self.model.norm_eps)
        return group.outer((u_TR, *others), prev, scale_T1, self._start_grad_sum)

    def _enter_sync(self, flow: Flow, gamma: Tensor, group: LinearGroup) -> Iterator[None]:
        """The statistic has its own all-reduce in both passes, and the norm is applied to x."""
        statistic = self.start(SUM_BOTH, sum_of_squares(flow.x))
        yield
        latents = group.policy.local(self._norm_and_inner_sync, flow.x, statistic.wait(), gamma, group)
        sums = [self.start(SUM_BOTH, u_TR, backward_started=group.saves_latents_only) for u_TR in latents]
        yield
        flow.arrived = tuple(latent.wait() for latent in sums)

    def _norm_and_inner_sync(self, x_TD: Tensor, s_T: Tensor, gamma_D: Tensor, group: LinearGroup) -> list[Tensor]:
        """Segment: A norm(x) for this process's columns, given the statistic."""
        normed_TD = scale(x_TD, inverse_rms(s_T, self.model.dim, self.model.norm_eps))
        return [linear(normed_TD, a_RD) for a_RD in group.inner_weights((group.A * gamma_D).to(x_TD.dtype))]

    def project_out(self, hidden: Tensor, group: LinearGroup) -> Tensor:
        """A for this process's heads or channels: a partial sum."""
        return linear(hidden, group.A)

    def leave(self, flow: Flow, partial: Tensor, group: LinearGroup) -> Iterator[None]:
        """The sum over processes, then act and B for this process's columns of the residual stream."""
        latents = self.start(SUM_BOTH, partial, backward_started=group.saves_latents_only)
        yield
        group.update(flow, latents.wait(), self._start_grad_sum)

    def head_input(self, flow: Flow, gamma: Tensor) -> Iterator[None]:
        """One all-gather of the residual stream (backward: a reduce-scatter), then the final norm of whole rows."""
        shards = self.start(GATHER, flow.x)
        yield
        flow.x = self.norm(collectives.rows_to_features(shards.wait(), self.axis), gamma)

    def logits(self, x: Tensor, gamma: Tensor, head: Tensor, tokens_N: Tensor) -> Tensor:
        whole = collectives.rows_to_features(collectives.all_gather(x[tokens_N], self.axis), self.axis)
        return self.gathered_logits(self.norm(whole, gamma), head)


# RMSNorm across shards.


class _ProjectAndMeasure(torch.autograd.Function):
    """forward: x [T, D], A [R, D], gamma [D] -> u = x (A gamma)^T [T, R] and, if measuring, s = sum_j x_j^2 [T] and the flat
    payload (u, then s), in which both are summed over an axis; in eager mode, u is a view of the payload.
    dgrad: dx = du (A gamma) + 2 x ds.
    wgrad: dA = (du^T x) gamma, dgamma = sum over R of (du^T x) A. No collective.

    gamma scales the columns of A instead of x, and the backward pass recomputes A gamma, so x is the only activation saved.
    """

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, a_RD: Tensor, gamma_D: Tensor, measured_over: Axis | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        ctx.save_for_backward(x_TD, a_RD, gamma_D)
        weight_DR = (a_RD * gamma_D).to(x_TD.dtype).t()
        if measured_over is None:
            return x_TD @ weight_DR, None, None
        s_T = row_sum_of_squares(x_TD)
        statistic = s_T if s_T.dtype == x_TD.dtype else _in_slots(s_T, x_TD.dtype, measured_over)
        if torch.compiler.is_compiling():  # compiled code writes the parts of a cat in place
            u_TR = x_TD @ weight_DR
            payload = torch.cat((u_TR.reshape(-1), statistic))
        else:
            tokens, width = x_TD.shape[0], weight_DR.shape[1]
            payload = x_TD.new_empty(tokens * width + statistic.numel())
            u, rest = payload.split((tokens * width, statistic.numel()))
            rest.copy_(statistic)
            u_TR = torch.mm(x_TD, weight_DR, out=u.view(tokens, width))
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
            dx_TD = du_TR @ (a_RD * gamma_D).to(x_TD.dtype)
            if ds_T is not None:
                dx_TD.addcmul_(x_TD, (2 * ds_T).to(x_TD.dtype).unsqueeze(-1))
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            d_RD = (du_TR.t() @ x_TD).to(a_RD.dtype)
            da_RD, dgamma_D = d_RD * gamma_D, (d_RD * a_RD).sum(0)
        return dx_TD, da_RD, dgamma_D, None


class _StartSum(torch.autograd.Function):
    """forward: starts the sum of `payload` over processes -> (u, in-flight payload); one all-reduce. The payload holds the
    latents u [T, R] and the statistic s [T], or only u if s is already in flight in `carrier`.
    dgrad: waits for the sum of du that `_WaitForSum` started; ds = -c^2 / 2d <u, du>, c = (s/d + eps)^(-1/2), from the complete
    sums u, s and du. ds needs no communication, and is exact for any function of c u.

    u is returned only for the autograd graph: its gradient must have the shape of u, not that of the payload.
    """

    @staticmethod
    def forward(
        ctx: Any, u_TR: Tensor, s_T: Tensor, payload: Tensor, carrier: Tensor | None, axis: Axis, width: int, eps: float
    ) -> tuple[Tensor, Tensor]:
        started = start_all_reduce(payload, axis)
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
    """forward: waits for the payload that `_StartSum` started -> the sums (u [T, R], s [T]), as views if possible.
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
        return du_TR if ctx.backward_started else start_all_reduce(du_TR, ctx.axis), None, None, None, None


class OnlineSum:
    """A norm(x) for a group's factors A and a sharded width: the in-flight sum, over processes, of the partial latents
    (gamma x) A^T and of the statistic that scales them.

    Each tensor of latents takes one all-reduce in each pass; the first also carries the statistic in the forward pass. The
    payload is flat: the elements of u, then s. In fp32 and fp64, s adds T elements. In bf16, a sum of rounded statistics
    would lose fp32's precision. Each process therefore writes its s_i into its own slot as three bf16 terms that preserve all 24
    bits. The other processes add zeros to it, which is exact, and the p slots are summed in fp32. This adds 3 p T elements.
    """

    def __init__(
        self,
        x_TD: Tensor,
        weights: Sequence[Tensor],
        gamma_D: Tensor,
        axis: Axis,
        width: int,
        eps: float,
        backward_started: bool = False,
    ) -> None:
        """`weights`: A [R, D] for all slots together, or one matrix per slot. `width`, `eps`: as in
        `inverse_rms`. The caller must multiply the latents by the inverse RMS and must not use them in any other way.
        `backward_started`: the consumer of the result starts the backward all-reduce itself."""
        self._axis, self._tokens, self._backward_started = axis, x_TD.shape[0], backward_started
        projected = [
            _ProjectAndMeasure.apply(x_TD, a_RD, gamma_D, None if n else axis) for n, a_RD in enumerate(weights)
        ]
        (u_TR, s_T, payload), *others = projected
        first = _StartSum.apply(u_TR, s_T, payload, None, axis, width, eps)
        rest = [_StartSum.apply(u_TR, s_T, u_TR, first[1], axis, width, eps) for u_TR, _, _ in others]
        self._started: list[tuple[Tensor, Tensor]] = [first, *rest]

    def wait(self) -> tuple[Tensor, ...]:
        """Returns (u, s, other latents), summed over processes."""
        (u_TR, started), *others = self._started
        first = _WaitForSum.apply(u_TR, started, self._tokens, self._axis, self._backward_started)
        return *first, *[_WaitForSum.apply(*each, 0, self._axis, self._backward_started)[0] for each in others]


def _in_slots(s_T: Tensor, dtype: torch.dtype, axis: Axis) -> Tensor:
    """fp32 [T] -> [p, 3, T], flat, in a narrower `dtype`: zero outside this process's slot, whose three terms sum to s exactly."""
    slots = torch.zeros(axis.size, STATISTIC_TERMS, s_T.numel(), dtype=dtype, device=s_T.device)
    rest = s_T
    for term in range(STATISTIC_TERMS):
        slots[axis.rank, term] = rest.to(dtype)
        rest = rest - slots[axis.rank, term].to(s_T.dtype)
    return slots.view(-1)


def _unpacked(summed: Tensor, tokens: int, axis: Axis) -> tuple[Tensor, Tensor]:
    """Summed payload -> (flat latents, statistic [T])."""
    slots = 1 if summed.dtype.itemsize >= 4 else axis.size * STATISTIC_TERMS
    latents = summed.numel() - slots * tokens
    u, statistic = summed[:latents], summed[latents:]  # not a split: see `_slots` in boost.models.kernels
    return u, statistic if slots == 1 else statistic.view(slots, tokens).to(torch.float32).sum(0)
