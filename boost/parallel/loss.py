"""Cross-entropy over an optionally sharded vocabulary, in chunks of tokens.

Legend: T tokens, D hidden width, V vocabulary rows on this process, N tokens of one chunk.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from boost.config.architecture import IGNORED
from boost.config.traffic import chunk_tokens
from boost.models.kernels import gemm, statistic_dtype
from boost.parallel.collectives import all_gather
from boost.parallel.mesh import Axis


class _CrossEntropy(torch.autograd.Function):
    """forward: x [T, D], W [V, D], targets [T] -> sum over tokens of logsumexp(x W^T) - (x W^T)[target], nats; one all-gather
    of (logsumexp, target logit) [N, 2] per chunk if the vocabulary is sharded, none otherwise.
    dgrad: dx = (softmax - onehot) W [T, D], a partial sum if sharded.
    wgrad: dW = (softmax - onehot)^T x [V, D].

    The forward pass computes the gradients chunk by chunk, so logits are neither saved nor computed twice. The backward pass
    only multiplies them by the gradient of the (scalar) loss.
    """

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, w_VD: Tensor, targets_T: Tensor, axis: Axis) -> Tensor:
        acc_dtype = statistic_dtype(x_TD.dtype)
        first = axis.rank * w_VD.shape[0]
        needs_gradient = any(ctx.needs_input_grad)
        dx_TD = torch.empty_like(x_TD) if needs_gradient else None
        dw_VD = torch.zeros_like(w_VD, dtype=acc_dtype) if needs_gradient else None
        total = torch.zeros((), dtype=acc_dtype, device=x_TD.device)
        step = chunk_tokens(w_VD.shape[0])
        for start in chunks(x_TD.shape[0], step):
            x_ND, targets_N = x_TD[start : start + step], targets_T[start : start + step]
            logits_NV = gemm(x_ND, w_VD.t()).to(acc_dtype)
            local_N = (targets_N - first).clamp(0, w_VD.shape[0] - 1)
            mine_N = (targets_N >= first) & (targets_N < first + w_VD.shape[0])
            counted_N = targets_N != IGNORED
            logsumexp_N, target_N = _whole_vocabulary(logits_NV, local_N, mine_N, axis)
            # Not in place: see `Kernel.traced` in boost.models.kernels.
            total = total + ((logsumexp_N - target_N) * counted_N).sum()
            if dx_TD is None or dw_VD is None:
                continue
            d_NV = logits_NV.sub_(logsumexp_N.unsqueeze(-1)).exp_()
            d_NV.scatter_add_(1, local_N.unsqueeze(-1), -mine_N.to(acc_dtype).unsqueeze(-1))
            d_NV = d_NV.mul_(counted_N.unsqueeze(-1)).to(x_TD.dtype)
            torch.mm(d_NV, w_VD, out=dx_TD[start : start + step])
            if dw_VD.dtype == x_TD.dtype:
                dw_VD.addmm_(d_NV.t(), x_ND)
            else:
                dw_VD += gemm(d_NV.t(), x_ND)
        ctx.save_for_backward(dx_TD, None if dw_VD is None else dw_VD.to(w_VD.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        dx_TD, dw_VD = ctx.saved_tensors
        return dx_TD * d.to(dx_TD.dtype), dw_VD * d.to(dw_VD.dtype), None, None


def chunks(tokens: int, step: int) -> Iterable[int]:
    """Start of each chunk of tokens."""
    return range(0, tokens, step)


def cross_entropy(x_TD: Tensor, w_VD: Tensor, targets_T: Tensor, axis: Axis) -> Tensor:
    """Differentiable sum of the cross-entropy over targets that are not IGNORED: fp32 (or fp64) scalar, equal on every process.

    `axis`: the axis that shards the vocabulary in equal contiguous rows (size 1: not sharded). The gradient of x is a partial
    sum over this axis.
    """
    if not torch.is_grad_enabled():
        x_TD, w_VD = x_TD.detach(), w_VD.detach()
    return _CrossEntropy.apply(x_TD, w_VD, targets_T, axis)


def _whole_vocabulary(logits_NV: Tensor, local_N: Tensor, mine_N: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    """Returns (logsumexp over the whole vocabulary, logit of the target), [N] each, from the local columns."""
    logsumexp_N = logits_NV.logsumexp(-1)
    target_N = logits_NV.gather(1, local_N.unsqueeze(-1)).squeeze(-1) * mine_N
    if axis.size == 1:
        return logsumexp_N, target_N
    both = all_gather(torch.stack((logsumexp_N, target_N)), axis).view(axis.size, 2, -1)
    return both[:, 0].logsumexp(0), both[:, 1].sum(0)
