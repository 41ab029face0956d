"""Gradients after the backward pass: reduced where they are partial, measured over the whole mesh, clipped.

Every parameter counts once in the norm: shards of a cut one are summed over TP, copies of a whole one are not.
"""

import contextlib
import functools
import weakref
from collections.abc import Iterable, Iterator, Sequence
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

    Under `overlapping`, each bucket is sent while the backward pass goes on, as soon as its last gradient is there:

        for each micro-batch but the last:
            loss.backward()
        with reducer.overlapping():
            loss.backward()
        reducer.finish()
    """

    def __init__(self, storages: Sequence[Storage], mesh: Mesh) -> None:
        trained = [s for s in storages if s.tensor.requires_grad]
        partial = [s.tensor for s in trained if s.cut.partial]
        complete = [s.tensor for s in trained if not s.cut.partial]
        self._lanes = [_Lane(partial, mesh.replicas), _Lane(complete, mesh.dp)]

    @contextlib.contextmanager
    def overlapping(self) -> Iterator[None]:
        """Around the backward pass that makes the gradients of this step final. One that fails leaves nothing behind."""
        for lane in self._lanes:
            lane.armed = True
        try:
            yield
        except BaseException:
            for lane in self._lanes:
                lane.reset()
            raise

    @torch.no_grad()
    def finish(self) -> None:
        """Waits for every sum, in place in the gradients. Sends what was not sent yet: all of it without `overlapping`."""
        for lane in self._lanes:
            lane.finish()


class _Bucket:
    """Parameters whose gradients travel together."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.missing = len(parameters)
        self._flat: Tensor | None = None

    def send(self, axis: Axis) -> None:
        """Moves the gradients into one tensor, of which they are views from now on, and begins to sum it."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        assert len(gradients) == len(self.parameters), "every parameter takes part in every step"
        self._flat = _flatten_dense_tensors(gradients)
        for parameter, view in zip(self.parameters, _unflatten_dense_tensors(self._flat, gradients), strict=True):
            parameter.grad = view
        start_all_reduce(self._flat, axis)

    def receive(self) -> None:
        """Waits for the sum."""
        assert self._flat is not None
        finish_all_reduce(self._flat)

    def reset(self) -> None:
        """Ready for the next step."""
        self._flat, self.missing = None, len(self.parameters)


class _Lane:
    """Buckets that are summed over one axis, always in one order, so that all processes send the same one next.

    The last parameters come first: the backward pass reaches them first.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], axis: Axis) -> None:
        self.axis, self.armed, self.sent = axis, False, 0
        self.buckets: list[_Bucket] = []
        rest = list(parameters)[::-1] if axis.size > 1 else []
        for length in bucket_lengths([parameter.nbytes for parameter in rest]):
            self.buckets.append(_Bucket(rest[:length]))
            rest = rest[length:]
        lane = weakref.ref(self)  # a parameter keeps its hook: a hook that kept the lane would keep all parameters
        for number, bucket in enumerate(self.buckets):
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(functools.partial(_arrived, lane, number))

    def finish(self) -> None:
        self.send_up_to(len(self.buckets))
        for bucket in self.buckets:
            bucket.receive()
        self.reset()

    def reset(self) -> None:
        for bucket in self.buckets:
            bucket.reset()
        self.armed, self.sent = False, 0

    def arrived(self, number: int) -> None:
        """A gradient of bucket `number` is final."""
        self.buckets[number].missing -= 1
        complete = self.sent
        while complete < len(self.buckets) and self.buckets[complete].missing == 0:
            complete += 1
        self.send_up_to(complete)

    def send_up_to(self, count: int) -> None:
        for bucket in self.buckets[self.sent : count]:
            bucket.send(self.axis)
        self.sent = count


@torch.no_grad()
def _arrived(reference: "weakref.ref[_Lane]", number: int, parameter: Tensor) -> None:
    lane = reference()
    if lane is not None and lane.armed:
        lane.arrived(number)


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
