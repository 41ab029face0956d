"""Every GEMM of the model goes through this file. Other precisions and deferred weight gradients belong here.

`up_project` is the activation and up-projection of a group as one autograd node that saves only latents: y_k = B_k act(c u)_k for
each slot k.

Legend: T tokens, R latent width of a group (all slots side by side), r of one slot, O local outputs of a slot; V rows
of a table of width D.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from boost.models.kernels import activated, activated_backward, statistic_dtype

StartCollective = Callable[[Tensor], Tensor]
"""Starts a collective whose result has the shape of its operand. Call `wait` before using the result."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Differentiable x W^T (+ b), [..., I] x [O, I] -> [..., O], in x's dtype: master weights are cast here."""
    if bias is not None:
        bias = bias.to(x.dtype)
    return F.linear(x, weight.to(x.dtype), bias)


def gemm(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a b, [m, k] x [k, n], for hand-written forward and backward passes; both of one dtype. `out`: the output tensor, which
    may be columns of a wider one."""
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


class _UpProject(torch.autograd.Function):
    """forward: u [T, R], c [T, 1] or None, B_k [O_k, r_k] -> y_k = h_k B_k^T [T, O_k], h = act(c u) [T, R], h_k its columns.
    dgrad: du = c act'(c u) dh, dh_k = dy_k B_k.
    wgrad: dB_k = dy_k^T h_k. No collective.

    Saves u and c. The backward pass recomputes c u, h and the casts of B, which is element-wise work. c is a constant here: the
    node that sums u over processes computes its gradient from u and du (`boost.parallel.norms.OnlineSum`). `start_grad_sum`
    starts the sum of du, which is in flight while the weight gradients are computed; the node that produced u waits for it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        u_TR: Tensor,
        c_T1: Tensor | None,
        silu: bool,
        start_grad_sum: StartCollective | None,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(u_TR, c_T1, *weights)
        ctx.silu, ctx.start_grad_sum = silu, start_grad_sum
        h_TR = u_TR if c_T1 is None and not silu else activated(u_TR, c_T1, silu)
        slots = zip(_slots(h_TR, weights), weights, strict=True)
        return tuple(gemm(h_Tr, b_Or.to(u_TR.dtype).t()) for h_Tr, b_Or in slots)

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> tuple[Tensor | None, ...]:
        u_TR, c_T1, *weights = ctx.saved_tensors
        dh_TR = gemms([(dy_TO, b_Or.to(u_TR.dtype)) for dy_TO, b_Or in zip(dy, weights, strict=True)])
        if c_T1 is None and not ctx.silu:
            du_TR, h_TR = dh_TR, u_TR
        else:
            du_TR, h_TR = activated_backward(dh_TR, u_TR, c_T1, ctx.silu)
        del dh_TR
        if ctx.start_grad_sum is not None:
            du_TR = ctx.start_grad_sum(du_TR)
        slots = zip(dy, _slots(h_TR, weights), weights, strict=True)
        dw = [gemm(dy_TO.t(), h_Tr).to(b_Or.dtype) for dy_TO, h_Tr, b_Or in slots]
        return du_TR, None, None, None, *dw


def up_project(
    u_TR: Tensor,
    c_T1: Tensor | None,
    silu: bool,
    weights: Sequence[Tensor],
    start_grad_sum: StartCollective | None = None,
) -> list[Tensor]:
    """Differentiable B_k act(c u)_k, one [T, O_k] for each B_k [O_k, r_k] of `weights`. Ranks add up to R; act is SiLU or the
    identity.

    c [T, 1] (None: 1) is multiplied before rounding and has no gradient. `start_grad_sum` starts the sum of u's gradient; only
    the node that produced u may consume that gradient, and must wait for it.
    """
    if not torch.is_grad_enabled():  # torch.compile does not inline a node with a variable number of operands
        h_TR = u_TR if c_T1 is None and not silu else activated(u_TR, c_T1, silu)
        return [linear(h_Tr, b_Or) for h_Tr, b_Or in zip(_slots(h_TR, weights), weights, strict=True)]
    return list(_UpProject.apply(u_TR, c_T1, silu, start_grad_sum, *weights))


def _slots(h_TR: Tensor, weights: Sequence[Tensor]) -> Sequence[Tensor]:
    if len(weights) == 1:
        return [h_TR]
    return h_TR.split([b_Or.shape[1] for b_Or in weights], dim=-1)


class _Lookup(torch.autograd.Function):
    """forward: tokens [T], table [V, D] -> rows [T, D]; wgrad: dtable [V, D] = sum of dy over the tokens of each row,
    accumulated in fp32 and rounded once. No collective.

    In a bf16 accumulation, the gradient of a token that occurs a thousand times stops growing after a few hundred of them.
    """

    @staticmethod
    def forward(ctx: Any, tokens_T: Tensor, table_VD: Tensor) -> Tensor:
        ctx.save_for_backward(tokens_T)
        ctx.rows, ctx.dtype = table_VD.shape[0], table_VD.dtype
        return F.embedding(tokens_T, table_VD)

    @staticmethod
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[None, Tensor]:
        (tokens_T,) = ctx.saved_tensors
        dy_acc_TD = dy_TD.to(statistic_dtype(dy_TD.dtype))
        return None, torch.ops.aten.embedding_dense_backward(dy_acc_TD, tokens_T, ctx.rows, -1, False).to(ctx.dtype)


def lookup(tokens_T: Tensor, table_VD: Tensor, dtype: torch.dtype) -> Tensor:
    """Differentiable lookup: rows [T, D] of a table, cast to `dtype`."""
    if table_VD.dtype == statistic_dtype(table_VD.dtype):
        return F.embedding(tokens_T, table_VD).to(dtype)
    rows: Tensor = _Lookup.apply(tokens_T, table_VD)
    return rows.to(dtype)
