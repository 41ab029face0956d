"""Cross-entropy and distillation loss over an optionally sharded vocabulary, in chunks of tokens; and the lookup in a head that is
also the embedding.

Legend: T tokens, D hidden width (the student's), E the teacher's, V vocabulary rows on this process, N tokens in one chunk.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from boost.config.architecture import IGNORED
from boost.config.layouts.spec import SCATTER_SUM, SUM_FORWARD, ResidualKind
from boost.config.traffic import chunk_tokens
from boost.models.fused import FusedParam
from boost.models.interface import Flow, Teaching
from boost.models.kernels import STATISTIC_DTYPE, Kernel, Node, gemm, lookup
from boost.parallel.collectives import InFlight, all_gather, features_to_rows
from boost.parallel.mesh import Axis


@functools.partial(Kernel, reads=2)
def token_logits(logits_NV: Tensor, local_N: Tensor, mine_N: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of V columns -> (logsumexp of each row, logit in column `local` or 0 if not `mine`), [N] each, fp32 or wider."""
    wide_NV = logits_NV.to(STATISTIC_DTYPE[logits_NV.dtype])
    return wide_NV.logsumexp(-1), wide_NV.gather(1, local_N.unsqueeze(-1)).squeeze(-1) * mine_N


@functools.partial(Kernel, dynamic=None)
def logit_gradient(
    logits_NV: Tensor, logsumexp_N: Tensor, local_N: Tensor, mine_N: Tensor, counted_N: Tensor
) -> Tensor:
    """Gradient of the cross-entropy with respect to the logits, in their dtype: softmax - onehot, or 0 if not `counted`. May
    overwrite the logits, which a product writes to `out`: selective checkpointing saves other products, and forbids overwriting."""
    if torch.compiler.is_compiling():  # one kernel, which a scatter would divide
        columns_V = torch.arange(logits_NV.shape[1], device=logits_NV.device)
        onehot_NV = (columns_V == local_N.unsqueeze(-1)) & mine_N.unsqueeze(-1)
        softmax_NV = (logits_NV - logsumexp_N.unsqueeze(-1)).exp()
        return ((softmax_NV - onehot_NV.to(softmax_NV.dtype)) * counted_N.unsqueeze(-1)).to(logits_NV.dtype)
    d_NV = logits_NV.to(logsumexp_N.dtype).sub_(logsumexp_N.unsqueeze(-1)).exp_()
    d_NV.scatter_add_(1, local_N.unsqueeze(-1), -mine_N.to(d_NV.dtype).unsqueeze(-1))
    return d_NV.mul_(counted_N.unsqueeze(-1)).to(logits_NV.dtype)


class _CrossEntropy(torch.autograd.Function):
    """forward: x [T, D], W [V, D], targets [T] -> sum over tokens of logsumexp(x W^T) - (x W^T)[target], nats; one all-gather
    of (logsumexp, target logit) [N, 2] per chunk if the vocabulary is sharded, none otherwise.
    dgrad: dx = (softmax - onehot) W [T, D], a partial sum if sharded.
    wgrad: dW = (softmax - onehot)^T x [V, D].

    The forward pass computes the gradients chunk by chunk, so logits are neither saved nor computed twice. The backward pass
    only multiplies these gradients by the gradient of the (scalar) loss.
    """

    @staticmethod
    def forward(ctx: Node, x_TD: Tensor, w_VD: Tensor, targets_T: Tensor, axis: Axis) -> Tensor:
        acc_dtype = STATISTIC_DTYPE[x_TD.dtype]
        first = axis.rank * w_VD.shape[0]
        needs_gradient = any(ctx.needs_input_grad)
        dx_TD = torch.empty_like(x_TD) if needs_gradient else None
        dw_VD = torch.zeros_like(w_VD, dtype=acc_dtype) if needs_gradient else None
        total = torch.zeros((), dtype=acc_dtype, device=x_TD.device)
        for rows in chunks(x_TD.shape[0], w_VD.shape[0]):
            x_ND, targets_N = x_TD[rows], targets_T[rows]
            logits_NV = gemm(x_ND, w_VD.t(), out=x_ND.new_empty(x_ND.shape[0], w_VD.shape[0]))
            local_N = (targets_N - first).clamp(0, w_VD.shape[0] - 1)
            mine_N = (targets_N >= first) & (targets_N < first + w_VD.shape[0])
            counted_N = targets_N != IGNORED
            logsumexp_N, target_N = _whole_vocabulary(logits_NV, local_N, mine_N, axis)
            total = total + ((logsumexp_N - target_N) * counted_N).sum()
            if dx_TD is None or dw_VD is None:
                continue
            d_NV = logit_gradient(logits_NV, logsumexp_N, local_N, mine_N, counted_N)
            torch.mm(d_NV, w_VD, out=dx_TD[rows])
            if dw_VD.dtype == x_TD.dtype:
                dw_VD.addmm_(d_NV.t(), x_ND)
            else:
                dw_VD += gemm(d_NV.t(), x_ND)
            del logits_NV, d_NV  # before the next chunk allocates its own
        ctx.save_for_backward(dx_TD, None if dw_VD is None else dw_VD.to(w_VD.dtype))
        return total

    @staticmethod
    def backward(ctx: Node, d: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        dx_TD, dw_VD = ctx.saved_tensors
        return dx_TD * d.to(dx_TD.dtype), dw_VD * d.to(dw_VD.dtype), None, None


def chunks(tokens: int, vocabulary: int) -> Iterable[slice]:
    """Slices of tokens whose logits over `vocabulary` local rows are in memory at the same time."""
    step = chunk_tokens(vocabulary)
    return map(slice, range(0, tokens, step), range(step, tokens + step, step))


def cross_entropy(x_TD: Tensor, w_VD: Tensor, targets_T: Tensor, axis: Axis) -> Tensor:
    """Differentiable sum of the cross-entropy over targets that are not IGNORED: fp32 (or fp64) scalar, equal on every process.

    `axis`: the axis that shards the vocabulary into equal contiguous parts (size 1: not sharded). The gradient of x is a
    partial sum over this axis.
    """
    if not torch.is_grad_enabled():
        x_TD, w_VD = x_TD.detach(), w_VD.detach()
    return _CrossEntropy.apply(x_TD, w_VD, targets_T, axis)


def _whole_vocabulary(logits_NV: Tensor, local_N: Tensor, mine_N: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    """Returns (logsumexp over the whole vocabulary, logit of the target), [N] each, from the local columns."""
    logsumexp_N, target_N = token_logits(logits_NV, local_N, mine_N)
    if axis.size == 1:
        return logsumexp_N, target_N
    both = all_gather(torch.stack((logsumexp_N, target_N)), axis).view(axis.size, 2, -1)
    return both[:, 0].logsumexp(0), both[:, 1].sum(0)


# Distillation.


class _DistillLoss(torch.autograd.Function):
    """forward: x [T, D], W [V, D], targets [T], teacher h [T, E], H [V, E] -> sum over tokens of
    (1 - w) CE(s) + w K^2 KL(softmax(t / K) || softmax(s / K)) + b mean((x - h)^2), s = x W^T, t = h H^T, temperature K; one
    all-gather of five statistics [5, N] per chunk if the vocabulary is sharded, none otherwise.
    dgrad: dx = ds W + (2 b / D) (x - h) / p [T, D], a partial sum if sharded over p processes, with
    ds = (1 - w) (softmax(s) - onehot) + w K (softmax(s / K) - softmax(t / K)).
    wgrad: dW = ds^T x [V, D].

    As in `_CrossEntropy`, the forward pass computes the gradients chunk by chunk.
    """

    @staticmethod
    def forward(ctx: Node, x_TD: Tensor, w_VD: Tensor, targets_T: Tensor, teaching: Teaching, axis: Axis) -> Tensor:
        acc_dtype = STATISTIC_DTYPE[x_TD.dtype]
        needs_gradient = any(ctx.needs_input_grad)
        dx_TD = torch.empty_like(x_TD) if needs_gradient else None
        dw_VD = torch.zeros_like(w_VD, dtype=acc_dtype) if needs_gradient else None
        total = torch.zeros((), dtype=acc_dtype, device=x_TD.device)
        head_VE = teaching.head_VE.to(x_TD.dtype)
        for rows in chunks(x_TD.shape[0], w_VD.shape[0]):
            x_ND, h_NE, targets_N = x_TD[rows], teaching.hidden_TE[rows], targets_T[rows]
            s_NV, t_NV = gemm(x_ND, w_VD.t()).to(acc_dtype), gemm(h_NE, head_VE.t()).to(acc_dtype)
            loss_N, cross_entropy_N, d_NV = _distill_chunk(s_NV, t_NV, targets_N, teaching, axis)
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
            del s_NV, t_NV, d_NV  # before the next chunk allocates its own
        ctx.save_for_backward(dx_TD, None if dw_VD is None else dw_VD.to(w_VD.dtype))
        return total

    @staticmethod
    def backward(ctx: Node, d: Tensor) -> tuple[Tensor | None, ...]:
        dx_TD, dw_VD = ctx.saved_tensors
        return dx_TD * d.to(dx_TD.dtype), dw_VD * d.to(dw_VD.dtype), None, None, None


def distill_loss(x_TD: Tensor, w_VD: Tensor, targets_T: Tensor, teaching: Teaching, axis: Axis) -> Tensor:
    """Differentiable sum of the distillation loss over targets that are not IGNORED: fp32 (or fp64) scalar, equal on every process.

    `axis`: the axis that shards both vocabularies into equal contiguous parts (size 1: not sharded). The gradient of x is a
    partial sum over this axis. The teacher gets no gradient.
    """
    if not torch.is_grad_enabled():
        x_TD, w_VD = x_TD.detach(), w_VD.detach()
    loss: Tensor = _DistillLoss.apply(x_TD, w_VD, targets_T, teaching, axis)
    return loss


def _distill_chunk(
    s_NV: Tensor, t_NV: Tensor, targets_N: Tensor, teaching: Teaching, axis: Axis
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns ((1 - w) CE + w K^2 KL for each token [N], CE [N], gradient of the former with respect to the local
    student logits [N, V])."""
    w, k = teaching.weight, teaching.temperature
    first, width = axis.rank * s_NV.shape[1], s_NV.shape[1]
    local_N = (targets_N - first).clamp(0, width - 1)
    mine_N = ((targets_N >= first) & (targets_N < first + width)).to(s_NV.dtype)
    target_N = s_NV.gather(1, local_N[:, None]).squeeze(-1) * mine_N
    soft_s_NV, soft_t_NV = s_NV / k, t_NV / k
    student_N, cold_N, teacher_N = s_NV.logsumexp(-1), soft_s_NV.logsumexp(-1), soft_t_NV.logsumexp(-1)
    p_NV = (soft_t_NV - teacher_N[:, None]).exp_()
    cross_N = (p_NV * (soft_t_NV - soft_s_NV)).sum(-1)  # expectation over the local rows only
    all_5N = _whole_statistics(torch.stack((student_N, target_N, cold_N, teacher_N, cross_N)), axis)
    p_NV.mul_((teacher_N - all_5N[3]).exp_()[:, None])
    student_N, target_N, cold_N, teacher_N, cross_N = all_5N
    divergence_N = cross_N - teacher_N + cold_N
    d_NV = (soft_s_NV - cold_N[:, None]).exp_().sub_(p_NV).mul_(w * k)
    d_NV += (s_NV - student_N[:, None]).exp_().mul_(1 - w)
    d_NV.scatter_add_(1, local_N[:, None], -(1 - w) * mine_N[:, None])
    cross_entropy_N = student_N - target_N
    return (1 - w) * cross_entropy_N + w * k**2 * divergence_N, cross_entropy_N, d_NV


def _whole_statistics(local_5N: Tensor, axis: Axis) -> Tensor:
    """Statistics over the whole vocabulary, from those of the local rows: logsumexp (student, T = 1), target logit,
    logsumexp (student, temperature), logsumexp (teacher, temperature), teacher's expectation of (t - s) / K."""
    if axis.size == 1:
        return local_5N
    local_p5N = all_gather(local_5N, axis).view(axis.size, 5, -1)
    teacher_pN = local_p5N[:, 3]
    whole_N = teacher_pN.logsumexp(0)
    cross_N = ((teacher_pN - whole_N).exp() * local_p5N[:, 4]).sum(0)
    sums = local_p5N[:, 0].logsumexp(0), local_p5N[:, 1].sum(0), local_p5N[:, 2].logsumexp(0)
    return torch.stack((*sums, whole_N, cross_N))


# A table that is both embedding and head.


def embed_rows(
    residual: ResidualKind, start: Callable[..., InFlight], axis: Axis, flow: Flow, table: Tensor, dtype: torch.dtype
) -> Iterator[None]:
    """`Layout.embed` for a table [V, d] that is sharded along the vocabulary: each process looks up its own rows, and their sum
    goes to the shards of the residual stream. Forward: one all-reduce of width d, or one reduce-scatter if the stream is sharded
    (backward: an all-gather)."""
    rows = table.shape[0]
    local_T = flow.x - axis.rank * rows
    others_T1 = ((local_T < 0) | (local_T >= rows)).unsqueeze(-1)
    own_TD = lookup(local_T.clamp(0, rows - 1), table, dtype).masked_fill(others_T1, 0)
    if residual == "hidden":
        own_TD = features_to_rows([own_TD], axis)
    summed = start(SUM_FORWARD if residual == "replicated" else SCATTER_SUM, own_TD)
    yield
    flow.x = summed.wait()


def add_other_use(tables: Sequence[FusedParam], pipeline: Axis) -> None:
    """Adds the gradients of the first and the last stage, each of which has a copy of the table: one send in each direction. Both
    add the same two numbers, so the copies stay equal to the last bit."""
    for fused in tables:
        own = fused.tensor.grad
        assert own is not None, "every parameter must have a gradient in every step"
        own, other = own.contiguous(), torch.empty(own.shape, dtype=own.dtype, device=own.device)
        group, peer = pipeline.group, pipeline.size - 1 - pipeline.rank
        receive, send = (
            dist.P2POp(op, x, group=group, group_peer=peer) for op, x in ((dist.irecv, other), (dist.isend, own))
        )
        for work in dist.batch_isend_irecv([receive, send]):
            work.wait()
        fused.tensor.grad = own + other
