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
from boost.parallel.collectives import all_reduce, finish_all_reduce, start_all_reduce
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


class GradientReducer:
    """Sums partial gradients over TP and DP, and complete ones over DP, once per optimizer step, in buckets.

    Armed by `start`, each bucket is sent while the backward pass goes on, as soon as its last gradient is there:

        for each micro-batch:
            if it is the last: reducer.start()
            loss.backward()
        reducer.finish()
    """

    def __init__(self, storages: Sequence[Storage], mesh: Mesh) -> None:
        partial = [s.tensor for s in storages if s.cut.partial]
        complete = [s.tensor for s in storages if not s.cut.partial]
        self._lanes = [_Lane(partial, mesh.replicas), _Lane(complete, mesh.dp)]

    def start(self) -> None:
        """To be called before the backward pass that makes the gradients of this step final."""
        for lane in self._lanes:
            lane.start()

    @torch.no_grad()
    def finish(self) -> None:
        """Waits for every sum, in place in the gradients. Sends what was not sent yet: all of it without `start`."""
        for lane in self._lanes:
            lane.finish()


class _Bucket:
    """Parameters whose gradients travel together."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.missing = len(parameters)
        self.flat: Tensor | None = None

    @property
    def gradients(self) -> list[Tensor]:
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        assert len(gradients) == len(self.parameters), "every parameter takes part in every step"
        return gradients

    def send(self, axis: Axis) -> None:
        self.flat = _flatten_dense_tensors(self.gradients)
        start_all_reduce(self.flat, axis)

    def receive(self) -> None:
        assert self.flat is not None
        finish_all_reduce(self.flat)
        for gradient, summed in zip(self.gradients, _unflatten_dense_tensors(self.flat, self.gradients), strict=True):
            gradient.copy_(summed)
        self.flat, self.missing = None, len(self.parameters)


class _Lane:
    """Buckets that are summed over one axis, always in one order, so that all processes send the same one next.

    The last parameters come first: the backward pass reaches them first.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], axis: Axis) -> None:
        self.axis, self.armed, self.sent = axis, False, 0
        self.buckets: list[_Bucket] = []
        if axis.size == 1:
            return
        rest = list(parameters)[::-1]
        for length in bucket_lengths([parameter.nbytes for parameter in rest]):
            self.buckets.append(_Bucket(rest[:length]))
            rest = rest[length:]
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(lambda _, bucket=bucket: self._arrived(bucket))

    def start(self) -> None:
        self.armed = True

    def finish(self) -> None:
        self._send_up_to(len(self.buckets))
        for bucket in self.buckets:
            bucket.receive()
        self.armed, self.sent = False, 0

    @torch.no_grad()
    def _arrived(self, bucket: _Bucket) -> None:
        if not self.armed:
            return
        bucket.missing -= 1
        complete = self.sent
        while complete < len(self.buckets) and self.buckets[complete].missing == 0:
            complete += 1
        self._send_up_to(complete)

    def _send_up_to(self, count: int) -> None:
        for bucket in self.buckets[self.sent : count]:
            bucket.send(self.axis)
        self.sent = count


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
