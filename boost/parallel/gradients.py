"""Gradients after the backward pass: reduced where they are partial, measured over the whole mesh, clipped.

Every parameter counts once in the norm, on whatever processes its parts and their copies are.
"""

import functools
import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.tensor import DTensor

from boost.config.traffic import bucket_lengths
from boost.models.stored import Storage
from boost.parallel.collectives import all_reduce, finish_all_reduce, start_all_reduce
from boost.parallel.mesh import Axis, Mesh


@dataclass(frozen=True)
class Agreement:
    """What all processes know after a step's backward pass."""

    loss: float
    """Mean cross-entropy over the targets of the global batch, nats a token."""
    gradient_norm: float
    """Global L2 norm of the gradient of that mean, before clipping."""
    stop: bool
    """Whether any process was asked to stop."""
    scale: float = 1.0
    """What the gradients must still be multiplied by: they were made as if every token had a target."""


class GradientReducer:
    """Sums partial gradients over TP and DP, and complete ones over DP, once per optimizer step, in buckets.

    Each bucket is sent while the backward pass goes on, as soon as its last gradient is final:

        reducer.begin(micro_batches)
        for each micro-batch:
            loss.backward()
        reducer.finish()

    Gradients of weights that replicas share arrive summed, in shards (`parallel.sharding`); only partial ones that are sharded
    over DP alone are left to be summed over TP, when all of them are there. Where a schedule makes gradients of weights in a
    pass of their own (zero bubble), no hook of theirs is called, and everything is sent by `finish`.
    """

    def __init__(self, storages: Sequence[Storage], mesh: Mesh) -> None:
        trained = [s for s in storages if s.parameter.requires_grad]
        held = [s for s in trained if s.shard is None]
        self._trained = trained
        self._lanes = [
            _Lane([s.parameter for s in held if s.placement.partial], mesh.replicas),
            _Lane([s.parameter for s in held if not s.placement.partial], mesh.dp),
        ]
        sharded = [s.tensor for s in trained if s.placement.partial and s.shard and s.shard.over == "dp"]
        self._late = _Lane(sharded, mesh.tp)

    def begin(self, micro_batches: int = 1) -> None:
        """Clears all gradients, and expects each as many times as there are micro-batches."""
        for storage in self._trained:
            storage.parameter.grad = storage.tensor.grad = None
        for lane in (*self._lanes, self._late):
            lane.expect(micro_batches)

    @torch.no_grad()
    def finish(self) -> None:
        """Waits for every sum, in place in the gradients of what is kept. Sends what was not sent yet."""
        for storage in self._trained:
            if storage.shard is not None:
                _take_over(storage)
        for lane in (*self._lanes, self._late):
            lane.send_up_to(len(lane.buckets))
        for lane in (*self._lanes, self._late):
            lane.receive()


def _take_over(storage: Storage) -> None:
    """The gradient of a sharded parameter, where its optimizer looks for it."""
    assert isinstance(storage.parameter, DTensor)
    local, gradient = storage.parameter.to_local(), storage.parameter.grad
    assert local.data_ptr() == storage.tensor.data_ptr(), "the shard that is updated is the one that is gathered"
    assert isinstance(gradient, DTensor), "every parameter takes part in every step"
    storage.tensor.grad = gradient.to_local()


class _Bucket:
    """Parameters whose gradients travel together."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.missing = 0
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

    def reset(self, micro_batches: int) -> None:
        """Ready for the next step."""
        self._flat, self.missing = None, len(self.parameters) * micro_batches


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

    def expect(self, micro_batches: int) -> None:
        """A step begins; gradients that come without one (someone else's backward pass) are not ours to send."""
        self.armed, self.sent = True, 0
        for bucket in self.buckets:
            bucket.reset(micro_batches)

    def receive(self) -> None:
        for bucket in self.buckets:
            bucket.receive()
            bucket.reset(1)
        self.armed, self.sent = False, 0

    def arrived(self, number: int) -> None:
        """A gradient of bucket `number` has had one more micro-batch added."""
        self.buckets[number].missing -= 1
        complete = self.sent
        while complete < len(self.buckets) and self.buckets[complete].missing == 0:
            complete += 1
        self.send_up_to(complete)

    def send_up_to(self, count: int) -> None:
        for bucket in self.buckets[self.sent : count]:
            bucket.send(self.axis)
        self.sent = max(self.sent, count)


@torch.no_grad()
def _arrived(reference: "weakref.ref[_Lane]", number: int, parameter: Tensor) -> None:
    lane = reference()
    if lane is not None and lane.armed:
        lane.arrived(number)


@torch.no_grad()
def agree(storages: Sequence[Storage], loss: Tensor, targets: int, tokens: int, stop: bool, mesh: Mesh) -> Agreement:
    """Loss, gradient norm, targets and wish to stop of the whole mesh, in one all-reduce of four fp64 numbers.

    `loss` is this replica's share of the sum over its targets, divided by `tokens`, equal on its TP processes and 0 on
    pipeline processes that do not predict; gradients are of the same quotient. `targets`: how many this replica counted,
    `tokens`: all positions of the global batch. The two differ only where positions have no target.
    """
    squares = loss.new_zeros((), dtype=torch.double)
    by_copies: dict[int, list[Tensor]] = defaultdict(list)
    for storage in storages:
        if storage.tensor.grad is not None:
            by_copies[_copies(storage, mesh)].append(storage.tensor.grad)
    for copies, gradients in by_copies.items():  # held alike by so many processes: each counts its share
        squares += _sum_of_squares(gradients) / copies
    counted = targets if mesh.tp.rank == mesh.pp.rank == 0 else 0
    facts = torch.stack(
        (loss.double() / mesh.tp.size, squares, *(loss.new_tensor(x).double() for x in (counted, stop)))
    )
    if mesh.size > 1:
        facts = all_reduce(facts, Axis(mesh.rank, mesh.size, torch.distributed.group.WORLD))
    loss_sum, square_sum, count, stops = facts.tolist()
    scale = tokens / max(count, 1)
    return Agreement(loss_sum * scale, square_sum**0.5 * scale, stops > 0, scale)


def clip(parameters: Iterable[nn.Parameter], agreement: Agreement, limit: float) -> None:
    """Scales gradients to those of the mean over targets, and so that their global norm is at most `limit` (0: any)."""
    norm, factor = agreement.gradient_norm, agreement.scale
    if limit and norm > limit:
        factor *= limit / norm
    if factor != 1:
        torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], factor)


def _copies(storage: Storage, mesh: Mesh) -> int:
    """Number of processes that keep the same rows of a stored tensor."""
    tp = mesh.tp.size if storage.placement.dim is None else 1
    if storage.shard is None:
        return tp * mesh.dp.size
    return tp if storage.shard.over == "dp" else 1


def _sum_of_squares(gradients: list[Tensor]) -> Tensor:
    # Each norm in fp32 at least: rounded to bf16 it would depend on how tensors are fused and cut.
    wide = torch.float64 if gradients[0].dtype == torch.float64 else torch.float32
    return torch.stack(torch._foreach_norm(gradients, 2, wide)).double().square().sum()
