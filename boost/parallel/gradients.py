"""Gradients after the backward pass: reduced where they are partial, measured over the whole mesh, clipped.

Every parameter counts once in the norm: shards of a cut one are summed over TP, copies of a whole one are not.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from boost.config.traffic import bucket_lengths
from boost.models.stored import Storage
from boost.parallel.collectives import all_reduce
from boost.parallel.mesh import Axis, Mesh


@dataclass(frozen=True)
class Agreement:
    """What all processes know after a step's backward pass."""

    loss: float
    """Mean cross-entropy of the global batch, nats a token."""
    gradient_norm: float
    """Global L2 norm before clipping."""
    stop: bool
    """Whether any process was asked to stop."""


def reduce_gradients(storages: Sequence[Storage], mesh: Mesh) -> None:
    """Sums partial gradients over TP and every gradient over DP, in place, once per optimizer step."""
    _sum_in_buckets([s.tensor for s in storages if s.cut.partial], mesh.tp)
    _sum_in_buckets([s.tensor for s in storages], mesh.dp)


@torch.no_grad()
def agree(storages: Sequence[Storage], loss: Tensor, stop: bool, mesh: Mesh) -> Agreement:
    """Loss, gradient norm and wish to stop of the whole mesh, in one all-reduce of three fp64 numbers.

    `loss` is this replica's share of the global mean, equal on its TP processes; gradients are equal on all replicas.
    """
    cut = [s.tensor.grad for s in storages if s.cut.dim is not None and s.tensor.grad is not None]
    whole = [s.tensor.grad for s in storages if s.cut.dim is None and s.tensor.grad is not None]
    squares = _sum_of_squares(cut, loss.device)
    if mesh.tp.rank == 0:  # held whole by every TP process: counted by one
        squares = squares + _sum_of_squares(whole, loss.device)
    facts = torch.stack(
        (loss.double() / mesh.tp.size, squares / mesh.dp.size, loss.new_tensor(stop, dtype=torch.double))
    )
    if mesh.size > 1:
        facts = all_reduce(facts, Axis(mesh.rank, mesh.size, torch.distributed.group.WORLD))
    loss_sum, square_sum, stops = facts.tolist()
    return Agreement(loss_sum, square_sum**0.5, stops > 0)


def clip(parameters: Iterable[nn.Parameter], norm: float, limit: float) -> None:
    """Scales gradients so that their global norm, measured as `norm`, is at most `limit`; 0 leaves them alone."""
    if limit and norm > limit:
        torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], limit / norm)


def _sum_of_squares(gradients: list[Tensor], device: torch.device) -> Tensor:
    if not gradients:
        return torch.zeros((), dtype=torch.double, device=device)
    # Each norm in fp32 at least: rounded to bf16 it would depend on how tensors are fused and cut.
    wide = torch.float64 if gradients[0].dtype == torch.float64 else torch.float32
    return torch.stack(torch._foreach_norm(gradients, 2, wide)).double().square().sum()


@torch.no_grad()
def _sum_in_buckets(parameters: Sequence[nn.Parameter], axis: Axis) -> None:
    if axis.size == 1:
        return
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    assert len(gradients) == len(parameters), "every parameter takes part in every step"
    for length in bucket_lengths([gradient.nbytes for gradient in gradients]):
        _sum_bucket(gradients[:length], axis)
        gradients = gradients[length:]


def _sum_bucket(gradients: list[Tensor], axis: Axis) -> None:
    flat = all_reduce(_flatten_dense_tensors(gradients), axis)
    for gradient, summed in zip(gradients, _unflatten_dense_tensors(flat, gradients), strict=True):
        gradient.copy_(summed)
