"""Runtime of `btp` (arXiv 2512.12131), and RMSNorm across shards of the hidden dimension. Shapes: `boost.config.layouts.btp`.

One pair of autograd nodes sums over processes in both passes: partial latents in the forward pass, their gradients in the backward
pass. So all operations on latents receive partial gradients, and their parameters' gradients are reduced once per optimizer step.

Dividing by sqrt(s/d + eps), where the statistic s is the sum of x^2 over the whole width, commutes with the linear map after it,
A (gamma * x). Each process's share of s can therefore be sent with its partial sum of A (gamma * x) (`StartSum`).

Legend: p TP processes, T tokens, D = d/p hidden width on this process, R latent width of a group, s the statistic of RMSNorm.
"""

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from boost.config.layouts import LayoutSpec
from boost.config.layouts.spec import GATHER, SUM_BOTH
from boost.config.schema import ModelConfig, ParallelConfig
from boost.config.traffic import ALL_REDUCE, STATISTIC_TERMS
from boost.layouts.runtime import BaseLayout
from boost.models.group import LinearGroup, Outputs
from boost.models.interface import NOTHING_IN_FLIGHT, Arrived, Flow
from boost.models.kernels import (
    Node,
    inverse_rms,
    lookup,
    own_columns,
    row_product,
    row_sum_of_squares,
    scale,
    select,
    sum_of_squares,
)
from boost.parallel import collectives
from boost.parallel.collectives import start_plain, wait
from boost.parallel.mesh import Axis, Mesh


class BTP(BaseLayout):
    """Hidden-sharded residual stream and all-reduces of width r."""

    def __init__(
        self, spec: LayoutSpec, model: ModelConfig, parallel: ParallelConfig, mesh: Mesh, is_inference: bool = False
    ) -> None:
        super().__init__(spec, model, parallel, mesh, is_inference)
        self._start_grad_sum = functools.partial(start_plain, ALL_REDUCE, axis=self.axis)
        """Starts summing the latents' gradient over processes, before the weight gradients are computed."""
        self._is_sync = parallel.norm == "sync"
        """Whether the norm's statistic has a separate all-reduce."""

    def embed(self, flow: Flow, table: Tensor, dtype: torch.dtype) -> tuple[None, ...]:
        """[T] -> [T, D]: each process looks up its own columns. No collective."""
        flow.x = lookup(flow.x, table, dtype)
        return NOTHING_IN_FLIGHT

    def enter(self, flow: Flow, gamma: Tensor, group: LinearGroup) -> Iterator[None]:
        """A norm(x), summed over processes: the latents and the statistic that scales them, which shares their all-reduce.
        The norm is applied after A, to T x R elements."""
        if self._is_sync:
            yield from self._enter_sync(flow, gamma, group)
            return
        axis, width, eps = self.axis, self.model.dim, self.model.norm_eps
        if self.grouping:
            started = StartSum.apply(flow.x, group.inner, gamma, axis, width, eps, group.index)
            yield
            u_TR, s_T = WaitForSum.apply(*started, axis, group.is_one_node)
        else:  # the statistic is sent with every slot
            slots = zip(group.inner_by_slot(group.inner), group.index_by_slot(), strict=True)
            each = [StartSum.apply(flow.x, a_RD, gamma, axis, width, eps, index) for a_RD, index in slots]
            yield
            sums = [WaitForSum.apply(*started, axis, group.is_one_node) for started in each]
            u_TR, s_T = tuple(u_Tr for u_Tr, _ in sums), sums[0][1]
        flow.arrived = u_TR, s_T, flow.take() if group.takes_prev else None

    def up(self, arrived: Arrived, group: LinearGroup) -> Outputs:
        """act, then B for this process's heads or channels."""
        u_TR, s_T, prev_TR = arrived
        scale_T1 = None if s_T is None else inverse_rms(s_T, self.model.dim, self.model.norm_eps)
        return group.up(u_TR, prev_TR, scale_T1, self._start_grad_sum)

    def _enter_sync(self, flow: Flow, gamma: Tensor, group: LinearGroup) -> Iterator[None]:
        """The statistic has its own all-reduce in both passes, and the norm is applied to x."""
        statistic = self.start(SUM_BOTH, sum_of_squares(flow.x))
        yield
        u_TR = group.policy.local(self._norm_and_down_sync, flow.x, statistic.wait(), gamma, group)
        latents = self.start(SUM_BOTH, u_TR, backward_started=group.is_one_node)
        yield
        flow.arrived = latents.wait(), None, flow.take() if group.takes_prev else None

    def _norm_and_down_sync(self, x_TD: Tensor, s_T: Tensor, gamma_D: Tensor, group: LinearGroup) -> Tensor:
        """Segment: A norm(x) for this process's columns, given the statistic."""
        normed_TD = scale(x_TD, inverse_rms(s_T, self.model.dim, self.model.norm_eps))
        return group.down(normed_TD, gamma_D)

    def leave(self, flow: Flow, partial: Tensor, group: LinearGroup) -> Iterator[None]:
        """The sum over processes, then act and B for this process's columns of the residual stream."""
        latents = self.start(SUM_BOTH, partial, backward_started=group.is_one_node)
        yield
        self.update(flow, latents.wait(), group, self._start_grad_sum)

    def head_input(self, flow: Flow, gamma: Tensor) -> Iterator[None]:
        """One all-gather of the residual stream (backward: a reduce-scatter), then the final norm of whole rows."""
        shards = self.start(GATHER, flow.x)
        yield
        flow.x = self.norm(collectives.rows_to_features(shards.wait(), self.axis), gamma)

    def logits(self, x: Tensor, gamma: Tensor, head: Tensor, tokens_N: Tensor) -> Tensor:
        whole = collectives.rows_to_features(collectives.all_gather(x[tokens_N], self.axis), self.axis)
        return self.gathered_logits(self.norm(whole, gamma), head)


# RMSNorm across shards: A norm(x) for a group's factors A. One all-reduce in the forward pass carries the partial latents
# (gamma x) A^T and the statistic that scales them; another one in the backward pass, the latents' gradient.
#
# The payload is flat: the elements of u, then s. In fp32 and fp64, s adds T elements. In bf16, a sum of rounded statistics would
# lose fp32's precision. Each process therefore writes its s_i into its own slot as three bf16 terms that preserve all 24 bits. The
# other processes add zeros to it, which is exact, and the p slots are summed in fp32. This adds 3 p T elements.


class StartSum(torch.autograd.Function):
    """forward: x [T, D], A [R, D], gamma [D] -> u = x (A gamma)^T [T, R]; starts the sum of the flat payload (u, then
    s = sum_j x_j^2 [T]) over processes -> (u, in-flight payload); one all-reduce. In eager mode, u is a view of the payload.
    dgrad: waits for the sum of du that `WaitForSum` started; dx = du (A gamma) + 2 x ds, with ds = -c^2 / 2d <u, du>,
    c = (s/d + eps)^(-1/2), from the complete sums u, s and du. ds needs no communication, and is exact for any function of c u.
    wgrad: dA = (du^T x) gamma, dgamma = sum over R of (du^T x) A.

    With `index` [K], selected inputs (gamma x)[:, index] follow u in the same payload, so the result is [T, R + K].

    gamma scales the columns of A instead of x, and the backward pass recomputes A gamma, so x is the only activation saved. u is
    returned only for the autograd graph: its gradient must have the shape of u, not that of the payload. `width`, `eps`: as in
    `inverse_rms`. The caller must multiply the summed u by the inverse RMS c, and must not use it in any other way.
    """

    @staticmethod
    def forward(
        ctx: Node,
        x_TD: Tensor,
        a_RD: Tensor,
        gamma_D: Tensor,
        axis: Axis,
        width: int,
        eps: float,
        index_K: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        weight_DR = (a_RD * gamma_D).to(x_TD.dtype).t()
        s_T = row_sum_of_squares(x_TD)
        statistic = s_T if s_T.dtype == x_TD.dtype else _in_slots(s_T, x_TD.dtype, axis)
        if torch.compiler.is_compiling():  # compiled code writes the parts of a cat in place
            u_TR = x_TD @ weight_DR
            if index_K is not None:
                u_TR = torch.cat((u_TR, select(x_TD, index_K, axis.rank * x_TD.shape[1], gamma_D)), dim=-1)
            payload = torch.cat((u_TR.reshape(-1), statistic))
        else:
            tokens, latents = x_TD.shape[0], weight_DR.shape[1] + (0 if index_K is None else index_K.shape[0])
            payload = x_TD.new_empty(tokens * latents + statistic.numel())
            u, rest = payload.split((tokens * latents, statistic.numel()))
            rest.copy_(statistic)
            u_TR = u.view(tokens, latents)
            if index_K is None:
                torch.mm(x_TD, weight_DR, out=u_TR)
            else:
                torch.mm(x_TD, weight_DR, out=u_TR[:, : weight_DR.shape[1]])
                at_K, own_K = own_columns(index_K, axis.rank * x_TD.shape[1], x_TD.shape[1])
                factor_K = (gamma_D.index_select(0, at_K) * own_K).to(x_TD.dtype)
                torch.mul(x_TD.index_select(-1, at_K), factor_K, out=u_TR[:, weight_DR.shape[1] :])
        started = start_plain(ALL_REDUCE, payload, axis)
        ctx.save_for_backward(x_TD, a_RD, gamma_D, started, index_K)
        ctx.axis, ctx.width, ctx.eps = axis, width, eps
        ctx.mark_non_differentiable(started)
        return u_TR, started

    @staticmethod
    def backward(ctx: Node, du_TR: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        x_TD, a_RD, gamma_D, started, index_K = ctx.saved_tensors
        du_TR = wait(du_TR)
        dx_TD = da_RD = dgamma_D = None
        dmade_TR = du_TR
        if index_K is not None:
            at_K, own_K = own_columns(index_K, ctx.axis.rank * x_TD.shape[1], x_TD.shape[1])
            dmade_TR, dselected_TK = du_TR[:, : a_RD.shape[0]], du_TR[:, a_RD.shape[0] :]
        # A pipeline may request input gradients and weight gradients in separate passes.
        if ctx.needs_input_grad[0]:
            u_TR, s_T = _unpacked(started, du_TR, ctx.axis)
            product_T = row_product(u_TR, du_TR, s_T.dtype)
            ds_T = product_T.mul_(inverse_rms(s_T, ctx.width, ctx.eps).squeeze(-1).square_()).mul_(-0.5 / ctx.width)
            dx_TD = dmade_TR @ (a_RD * gamma_D).to(x_TD.dtype)
            dx_TD.addcmul_(x_TD, (2 * ds_T).to(x_TD.dtype).unsqueeze(-1))
            if index_K is not None:
                factor_K = (gamma_D.index_select(0, at_K) * own_K).to(x_TD.dtype)
                dx_TD.index_add_(1, at_K, dselected_TK * factor_K)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            d_RD = (dmade_TR.t() @ x_TD).to(a_RD.dtype)
            da_RD, dgamma_D = d_RD * gamma_D, (d_RD * a_RD).sum(0)
            if index_K is not None:
                sums_K = (dselected_TK * x_TD.index_select(-1, at_K)).sum(0, dtype=dgamma_D.dtype)
                dgamma_D.index_add_(0, at_K, sums_K * own_K)
        return dx_TD, da_RD, dgamma_D, None, None, None, None


class WaitForSum(torch.autograd.Function):
    """forward: waits for the payload that `StartSum` started -> the sums (u [T, R], s [T]), as views if possible.
    dgrad: starts the sum of du over processes, one all-reduce, unless `backward_started`: then the consumer of u starts it. s has
    no gradient here: `StartSum` computes it."""

    @staticmethod
    def forward(ctx: Node, u_TR: Tensor, started: Tensor, axis: Axis, backward_started: bool) -> tuple[Tensor, Tensor]:
        ctx.axis, ctx.backward_started = axis, backward_started
        u_TR, s_T = _unpacked(wait(started), u_TR, axis)
        ctx.mark_non_differentiable(s_T)
        return u_TR, s_T

    @staticmethod
    def backward(ctx: Node, du_TR: Tensor, _: Any) -> tuple[Tensor, None, None, None]:
        return du_TR if ctx.backward_started else start_plain(ALL_REDUCE, du_TR, ctx.axis), None, None, None


def _in_slots(s_T: Tensor, dtype: torch.dtype, axis: Axis) -> Tensor:
    """fp32 [T] -> [p, 3, T], flat, in a narrower `dtype`: zero outside this process's slot, whose three terms sum to s exactly."""
    slots = torch.zeros(axis.size, STATISTIC_TERMS, s_T.numel(), dtype=dtype, device=s_T.device)
    rest = s_T
    for term in range(STATISTIC_TERMS):
        slots[axis.rank, term] = rest.to(dtype)
        rest = rest - slots[axis.rank, term].to(s_T.dtype)
    return slots.view(-1)


def _unpacked(summed: Tensor, like_TR: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    """Summed payload -> (latents [T, R], statistic [T])."""
    slots = 1 if summed.dtype.itemsize >= 4 else axis.size * STATISTIC_TERMS
    latents, tokens = like_TR.numel(), like_TR.shape[0]
    u, statistic = summed[:latents], summed[latents:]  # not a split: see `UpProject` in boost.models.kernels
    return u.view_as(like_TR), statistic if slots == 1 else statistic.view(slots, tokens).to(torch.float32).sum(0)
