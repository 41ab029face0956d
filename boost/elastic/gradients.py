"""Gradient sums that can be discarded and recomputed, over a mesh whose replicas change."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from boost.parallel.gradients import BucketQueue, GradBucket, GradientReducer
from boost.parallel.mesh import Axis, Mesh


class ElasticReducer(GradientReducer):
    """A `GradientReducer` that keeps this process's own gradients next to their sums until the next step begins."""

    def queue(self, parameters: Sequence[nn.Parameter], axis: Axis, dtype: torch.dtype | None) -> BucketQueue:
        """The buckets of `parameters`. An axis of one process has buckets too: others may join."""
        return BucketQueue(parameters, axis, dtype, _KeptBucket)

    def rejoin(self, mesh: Mesh) -> None:
        """Sums over the axes of `mesh` from now on."""
        for queue, axis in zip(self._queues, (mesh.replicas, mesh.dp_cp, mesh.tp), strict=True):
            queue.axis = axis

    def begin(self, micro_batches: int = 1) -> None:
        """Starts a step, as in the base class, and forgets the own gradients of the previous one."""
        super().begin(micro_batches)
        for queue in self._queues:
            for bucket in queue.buckets:
                cast(_KeptBucket, bucket).own = []

    def restore_local(self) -> None:
        """Discards sums, in flight or complete. Gradients are this process's own again and can be accumulated into. Until the next
        step only `finish` sums them."""
        for queue in self._queues:
            queue.active, queue.next_bucket = False, 0
            for bucket in queue.buckets:
                cast(_KeptBucket, bucket).take_back()


class _KeptBucket(GradBucket):
    """A bucket that keeps what it sums."""

    def __init__(self, parameters: Sequence[nn.Parameter], dtype: torch.dtype | None) -> None:
        super().__init__(parameters, dtype)
        self.own: list[Tensor] = []
        """This process's own gradients; empty until the sum starts."""

    def launch(self, axis: Axis) -> None:
        if axis.size > 1:
            own = self.gradients()
            # torch sums a single gradient in place instead of in a flat copy.
            self.own = own if self.is_cast or len(own) > 1 else [own[0].clone()]
        super().launch(axis)

    def wait(self) -> None:
        if (
            self.flat is not None and self.is_cast
        ):  # the base class would copy the sums over this process's own gradients
            for parameter, gradient in zip(self.parameters, self.own, strict=True):
                parameter.grad = torch.empty_like(gradient)
        super().wait()

    def take_back(self) -> None:
        """Restores the gradients from before `launch`. An all-reduce still in flight uses its own memory."""
        for parameter, gradient in zip(self.parameters, self.own, strict=bool(self.own)):
            parameter.grad = gradient
        self.flat, self.own = None, []
