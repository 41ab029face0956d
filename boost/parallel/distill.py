"""Distillation loss over an optionally sharded vocabulary, in chunks of tokens.

Legend: T tokens, D hidden width of the student, E of the teacher, V vocabulary rows on this process, N tokens of one chunk.
"""

from typing import Any

import torch
from torch import Tensor

from boost.config.architecture import IGNORED
from boost.config.traffic import chunk_tokens
from boost.models.interface import Teaching
from boost.models.kernels import gemm, statistic_dtype
from boost.parallel.collectives import all_gather
from boost.parallel.loss import chunks
from boost.parallel.mesh import Axis


class _DistillLoss(torch.autograd.Function):
    """forward: x [T, D], W [V, D], targets [T], teacher h [T, E], H [V, E] -> sum over tokens of
    (1 - w) CE(s) + w K^2 KL(softmax(t / K) || softmax(s / K)) + b mean((x - h)^2), s = x W^T, t = h H^T, temperature K; one
    all-gather of five statistics [5, N] per chunk if the vocabulary is sharded, none otherwise.
    dgrad: dx = ds W + (2 b / D) (x - h) / p [T, D], a partial sum if sharded over p processes, with
    ds = (1 - w) (softmax(s) - onehot) + w K (softmax(s / K) - softmax(t / K)).
    wgrad: dW = ds^T x [V, D].

    As in `boost.parallel.loss`, the forward pass computes the gradients chunk by chunk.
    """

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, w_VD: Tensor, targets_T: Tensor, teaching: Teaching, axis: Axis) -> Tensor:
        acc_dtype = statistic_dtype(x_TD.dtype)
        needs_gradient = any(ctx.needs_input_grad)
        dx_TD = torch.empty_like(x_TD) if needs_gradient else None
        dw_VD = torch.zeros_like(w_VD, dtype=acc_dtype) if needs_gradient else None
        total = torch.zeros((), dtype=acc_dtype, device=x_TD.device)
        step = chunk_tokens(w_VD.shape[0])
        head_VE = teaching.head_VE.to(x_TD.dtype)
        for start in chunks(x_TD.shape[0], step):
            rows = slice(start, start + step)
            x_ND, h_NE, targets_N = x_TD[rows], teaching.hidden_TE[rows], targets_T[rows]
            s_NV, t_NV = gemm(x_ND, w_VD.t()).to(acc_dtype), gemm(h_NE, head_VE.t()).to(acc_dtype)
            loss_N, cross_entropy_N, d_NV = _chunk(s_NV, t_NV, targets_N, teaching, axis)
            counted_N = (targets_N != IGNORED).to(acc_dtype)
            difference_ND = None
            if teaching.hidden_weight:
                difference_ND = x_ND.to(acc_dtype) - h_NE.to(acc_dtype)
                loss_N = loss_N + teaching.hidden_weight * difference_ND.square().mean(-1)
            total = total + (loss_N * counted_N).sum()
            if teaching.cross_entropy is not None:
                teaching.cross_entropy.add_((cross_entropy_N * counted_N).sum())
            if dx_TD is None or dw_VD is None:
                continue
            d_NV = d_NV.mul_(counted_N[:, None]).to(x_TD.dtype)
            torch.mm(d_NV, w_VD, out=dx_TD[rows])
            if difference_ND is not None:
                scale = 2 * teaching.hidden_weight / x_TD.shape[1] / axis.size
                dx_TD[rows] += (difference_ND * (scale * counted_N)[:, None]).to(x_TD.dtype)
            dw_VD += gemm(d_NV.t(), x_ND)
        ctx.save_for_backward(dx_TD, None if dw_VD is None else dw_VD.to(w_VD.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        dx_TD, dw_VD = ctx.saved_tensors
        return dx_TD * d.to(dx_TD.dtype), dw_VD * d.to(dw_VD.dtype), None, None, None


def distill_loss(x_TD: Tensor, w_VD: Tensor, targets_T: Tensor, teaching: Teaching, axis: Axis) -> Tensor:
    """Differentiable sum of the distillation loss over targets that are not IGNORED: fp32 (or fp64) scalar, equal on every process.

    `axis`: the axis that shards both vocabularies in equal contiguous rows (size 1: not sharded). The gradient of x is a partial
    sum over this axis. The teacher gets no gradient.
    """
    if not torch.is_grad_enabled():
        x_TD, w_VD = x_TD.detach(), w_VD.detach()
    loss: Tensor = _DistillLoss.apply(x_TD, w_VD, targets_T, teaching, axis)
    return loss


def _chunk(
    s_NV: Tensor, t_NV: Tensor, targets_N: Tensor, teaching: Teaching, axis: Axis
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns ((1 - w) CE + w K^2 KL of each token [N], CE [N], gradient of the former with respect to the local student logits
    [N, V])."""
    w, k = teaching.weight, teaching.temperature
    first, width = axis.rank * s_NV.shape[1], s_NV.shape[1]
    local_N = (targets_N - first).clamp(0, width - 1)
    mine_N = ((targets_N >= first) & (targets_N < first + width)).to(s_NV.dtype)
    target_N = s_NV.gather(1, local_N[:, None]).squeeze(-1) * mine_N
    soft_s_NV, soft_t_NV = s_NV / k, t_NV / k
    student_N, cold_N, teacher_N = s_NV.logsumexp(-1), soft_s_NV.logsumexp(-1), soft_t_NV.logsumexp(-1)
    p_NV = (soft_t_NV - teacher_N[:, None]).exp_()
    cross_N = (p_NV * (soft_t_NV - soft_s_NV)).sum(-1)  # expectation over the local rows only
    all_5N = _whole_vocabulary(torch.stack((student_N, target_N, cold_N, teacher_N, cross_N)), axis)
    p_NV.mul_((teacher_N - all_5N[3]).exp_()[:, None])
    student_N, target_N, cold_N, teacher_N, cross_N = all_5N
    divergence_N = cross_N - teacher_N + cold_N
    d_NV = (soft_s_NV - cold_N[:, None]).exp_().sub_(p_NV).mul_(w * k)
    d_NV += (s_NV - student_N[:, None]).exp_().mul_(1 - w)
    d_NV.scatter_add_(1, local_N[:, None], -(1 - w) * mine_N[:, None])
    cross_entropy_N = student_N - target_N
    return (1 - w) * cross_entropy_N + w * k**2 * divergence_N, cross_entropy_N, d_NV


def _whole_vocabulary(local_5N: Tensor, axis: Axis) -> Tensor:
    """Statistics over the whole vocabulary from those of the local rows: logsumexp (student, T = 1), target logit, logsumexp
    (student, temperature), logsumexp (teacher, temperature), teacher's expectation of (t - s) / K."""
    if axis.size == 1:
        return local_5N
    local_p5N = all_gather(local_5N, axis).view(axis.size, 5, -1)
    teacher_pN = local_p5N[:, 3]
    whole_N = teacher_pN.logsumexp(0)
    cross_N = ((teacher_pN - whole_N).exp() * local_p5N[:, 4]).sum(0)
    sums = local_p5N[:, 0].logsumexp(0), local_p5N[:, 1].sum(0), local_p5N[:, 2].logsumexp(0)
    return torch.stack((*sums, whole_N, cross_N))
