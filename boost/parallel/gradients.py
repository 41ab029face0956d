"""Reduces partial gradients, computes the gradient norm over the whole mesh, and clips the gradients.

The norm counts every parameter once, no matter how many processes hold its shards or replicas.
"""

import enum
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.tensor import DTensor

from boost.config.storage import SUM_AXES, sum_axis
from boost.config.traffic import bucket_lengths
from boost.models.fused import FusedParam
from boost.models.kernels import STATISTIC_DTYPE
from boost.parallel.collectives import all_reduce, start_all_reduce_, wait
from boost.parallel.loss import add_other_use
from boost.parallel.mesh import Axis, Mesh


class StepFlags(enum.Flag):
    """Requests that any process can attach to a step. All processes see the union of the requests in the same step."""

    NONE = 0
    SIGNAL = enum.auto()
    """A stop signal was received: save and stop."""
    STOP = enum.auto()
    """A hook requested that the run save and stop."""
    SAVE = enum.auto()
    """A hook requested a checkpoint after this step."""
    JOIN = enum.auto()
    """Processes are waiting to join the run."""


@dataclass(frozen=True)
class StepStats:
    """Statistics for a step over the whole mesh, the same on all processes."""

    loss: float
    """Mean loss over the global batch's targets, in nats per token: cross-entropy or a distillation loss."""
    gradient_norm: float
    """Global L2 norm of the gradient of that mean, before clipping."""
    flags: StepFlags = StepFlags.NONE
    """Flags that any process raised."""
    scale: float = 1.0
    """Factor still to be applied to the gradients, because the backward pass also counts positions without a target."""
    cross_entropy: float | None = None
    """Mean cross-entropy of a distillation, in nats per token. None: `loss` is the cross-entropy."""
    targets: int = 1
    """Number of targets in the global batch. If there are none, loss and gradient norm are 0."""

    @property
    def is_finite(self) -> bool:
        """Whether both loss and gradient norm are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)

    @property
    def updates(self) -> bool:
        """Whether the step changes weights and moments. A step without targets would only decay them."""
        return self.is_finite and self.targets > 0


class GradientReducer:
    """Sums partial gradients over TP and DP, and complete gradients over DP, once per optimizer step, in buckets.

    Each bucket's all-reduce starts during the backward pass as soon as its last gradient is ready:

        reducer.begin(micro_batches)
        for each micro-batch:
            loss.backward()
        reducer.finish()

    Gradients of sharded parameters (`parallel.weights`) are already reduced to shards. Only partial gradients that are
    sharded over DP but not TP still need a sum over TP after the backward pass.
    """

    def __init__(
        self,
        fused_params: Sequence[FusedParam],
        mesh: Mesh,
        dtype: torch.dtype | None = None,
        bucket: "type[GradBucket] | None" = None,
    ) -> None:
        """`dtype`: the dtype of communication; None: the dtype of the gradients. `bucket`: a class of buckets to use instead of
        `GradBucket`, also on axes with one process, because others may join."""
        trainable = [s for s in fused_params if s.parameter.requires_grad]
        self._trainable, self._pipeline = trainable, mesh.pp
        self._tied = [s for s in trainable if mesh.pp.size > 1 and s.slices[0].parameter.role == "tied"]
        summed: dict[str, list[nn.Parameter]] = {name: [] for name in ("", *SUM_AXES)}
        for s in trainable:
            summed[sum_axis(s.placement.partial, s.shard.over if s.shard else "")].append(s.tensor)
        axes = (lambda: mesh.replicas), (lambda: mesh.dp_cp), (lambda: mesh.tp)  # read again for each sum
        self.queues = [
            BucketQueue(summed[name] if bucket or axis().size > 1 else [], axis, dtype, bucket or GradBucket)
            for name, axis in zip(SUM_AXES, axes, strict=True)
        ]

    def begin(self, micro_batches: int = 1) -> None:
        """Clears all gradients and prepares for one backward pass per micro-batch."""
        for fused in self._trainable:
            fused.parameter.grad = fused.tensor.grad = None
        for queue in self.queues:
            queue.prepare_for_backward(micro_batches)

    def accumulated(self, parameter: nn.Parameter) -> None:
        """Counts one micro-batch for a parameter whose gradient was accumulated outside autograd (`parallel.weights`)."""
        for queue in self.queues:
            if queue.active and parameter in queue.bucket_of:
                queue.mark_gradient_ready(queue.bucket_of[parameter])

    @torch.no_grad()
    def finish(self) -> None:
        """Launches the remaining buckets and waits for all of them. Gradients of the stored tensors then hold the sums."""
        for fused in self._trainable:
            if fused.shard is not None:  # put the local shard of the DTensor gradient where the optimizer expects it
                assert isinstance(fused.parameter, DTensor)
                local, gradient = fused.parameter.to_local(), fused.parameter.grad
                assert local.data_ptr() == fused.tensor.data_ptr(), (
                    "the optimizer must update the shard that FSDP gathers"
                )
                assert isinstance(gradient, DTensor), "every parameter must have a gradient in every step"
                fused.tensor.grad = gradient.to_local()
        for queue in self.queues:
            queue.launch_until(len(queue.buckets))
        for queue in self.queues:
            queue.wait()
        add_other_use(self._tied, self._pipeline)


class GradBucket:
    """Parameters whose gradients share one all-reduce."""

    def __init__(self, parameters: Sequence[nn.Parameter], dtype: torch.dtype | None) -> None:
        self.parameters = parameters
        self.pending = 0
        """Remaining gradient accumulations in this step."""
        self.is_cast = dtype not in (None, parameters[0].dtype)
        self.flat: Tensor | None = None
        """The sums in flight."""
        self._dtype = dtype

    def launch(self, axis: Axis) -> None:
        """Flattens the gradients into one tensor and starts its all-reduce. Unless dtypes differ, the gradients become views of
        it."""
        if axis.size == 1:
            return
        gradients = self.gradients()
        if self.is_cast:
            self.flat = gradients[0].new_empty(sum(g.numel() for g in gradients), dtype=self._dtype)
            torch._foreach_copy_(_unflatten_dense_tensors(self.flat, gradients), gradients)
        else:
            self.flat = _flatten_dense_tensors(gradients)
            for parameter, view in zip(self.parameters, _unflatten_dense_tensors(self.flat, gradients), strict=True):
                parameter.grad = view
        start_all_reduce_(self.flat, axis)

    def wait(self) -> None:
        """Waits for the all-reduce."""
        if self.flat is None:
            return
        wait(self.flat)
        if self.is_cast:
            gradients = self.gradients()
            torch._foreach_copy_(gradients, _unflatten_dense_tensors(self.flat, gradients))
        self.flat = None

    def gradients(self) -> list[Tensor]:
        """The parameters' gradients."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        assert len(gradients) == len(self.parameters), "every parameter must have a gradient in every step"
        return gradients

    def reset(self, micro_batches: int) -> None:
        """Prepares for the next step."""
        self.flat, self.pending = None, len(self.parameters) * micro_batches


class BucketQueue:
    """Buckets that are reduced over one axis, in the same order on every process.

    Buckets hold parameters in reverse order, because the backward pass reaches the last parameters first.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        axis: Callable[[], Axis],
        dtype: torch.dtype | None,
        bucket: type[GradBucket],
    ) -> None:
        self._axis, self.active, self.next_bucket = axis, False, 0
        self.buckets: list[GradBucket] = []
        rest = list(parameters)[::-1]
        for length in bucket_lengths([parameter.nbytes for parameter in rest]):
            self.buckets.append(bucket(rest[:length], dtype))
            rest = rest[length:]
        self.bucket_of = {p: index for index, made in enumerate(self.buckets) for p in made.parameters}
        reference = weakref.ref(self)  # parameters own their hooks: a strong reference would keep all parameters alive

        @torch.no_grad()
        def accumulated(parameter: Tensor) -> None:
            queue = reference()
            if queue is not None and queue.active:
                queue.mark_gradient_ready(queue.bucket_of[parameter])  # type: ignore[index]

        for parameter in self.bucket_of:
            parameter.register_post_accumulate_grad_hook(accumulated)

    def prepare_for_backward(self, micro_batches: int) -> None:
        """Starts a step. Gradients from any other backward pass are ignored."""
        self.active, self.next_bucket = True, 0
        for bucket in self.buckets:
            bucket.reset(micro_batches)

    def wait(self) -> None:
        """Waits for all buckets and ends the step."""
        for bucket in self.buckets:
            bucket.wait()
        self.active, self.next_bucket = False, 0

    def mark_gradient_ready(self, index: int) -> None:
        """Counts one micro-batch for a parameter in bucket `index` and launches the buckets before the first incomplete one."""
        self.buckets[index].pending -= 1
        ready = self.next_bucket
        while ready < len(self.buckets) and self.buckets[ready].pending == 0:
            ready += 1
        self.launch_until(ready)

    def launch_until(self, end: int) -> None:
        """Launches all buckets before index `end` that have not been launched yet."""
        for bucket in self.buckets[self.next_bucket : end]:
            bucket.launch(self._axis())
        self.next_bucket = max(self.next_bucket, end)


class LaunchedStats:
    """Statistics for a step, in flight. On a GPU, the host has not waited for them yet."""

    def __init__(self, sums: Tensor, tokens: int) -> None:
        """`sums`: loss, squared gradient norm, number of targets, encoded flags and, with a teacher, cross-entropy, fp64 [4 or 5].
        `tokens`: see `launch_step_stats`."""
        self._sums, self._tokens = sums, tokens
        self._host, self._arrived = sums, None
        if sums.device.type == "cuda":
            self._host = torch.empty_like(sums, device="cpu", pin_memory=True).copy_(sums, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(sums.device))

    @classmethod
    def of(cls, numbers: Sequence[float], tokens: int) -> "LaunchedStats":
        """Inverse of `numbers`."""
        return cls(torch.tensor(numbers, dtype=torch.double), tokens)

    def numbers(self) -> list[float]:
        """Returns the sums on the host. Waits as `read` does."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return list(self._host.tolist())

    def read(self) -> StepStats:
        """Returns the statistics. Waits for work launched before them but not for work launched after them."""
        loss_sum, square_sum, count, flag_sum, *text = self.numbers()
        scale = self._tokens / max(count, 1)
        cross_entropy = text[0] * scale if text else None
        mean = loss_sum * scale, square_sum**0.5 * scale
        return StepStats(*mean, _decode(flag_sum), scale, cross_entropy, int(count))

    @torch.no_grad()
    def for_update(self, max_norm: float) -> tuple[Tensor, Tensor]:
        """Returns (divisor in fp64, skip in fp32), scalars on the device, for `Optimizer.launch`.

        Gradients divided by the divisor match those of `clip_gradients` up to rounding; the divisor is exactly 1 if there is
        nothing to scale. skip: 0 if the step `updates`, else 1.
        """
        loss_sum, square_sum, count = self._sums[:3]
        scale = self._tokens / count.clamp(min=1)
        norm = square_sum.sqrt() * scale
        divisor = 1 / scale
        if max_norm:
            divisor = divisor * (norm / max_norm).clamp(min=1)
        sound = (loss_sum * scale).isfinite() & norm.isfinite() & (count > 0)
        return divisor, (~sound).float()


@torch.no_grad()
def launch_step_stats(
    fused_params: Sequence[FusedParam],
    loss: Tensor,
    targets: int,
    tokens: int,
    mesh: Mesh,
    flags: StepFlags = StepFlags.NONE,
    cross_entropy: Tensor | None = None,
) -> LaunchedStats:
    """Reduces the loss, gradient norm, number of targets and flags over the whole mesh, in one all-reduce of four fp64
    numbers. Does not wait for the result.

    `loss`: the sum over this replica's targets divided by `tokens`; equal on its TP ranks, 0 on pipeline ranks without the
    head. The gradients are also those of this quotient. `targets`: number of this replica's positions with a target.
    `tokens`: number of positions in the global batch. The replicas' `targets` add up to `tokens` unless some positions have
    no target. `cross_entropy`: defined like `loss`; reduced as a fifth number.
    """
    squares = loss.new_zeros((), dtype=torch.double)
    by_copies: dict[int, list[Tensor]] = defaultdict(list)
    for fused in fused_params:
        if fused.tensor.grad is None:
            continue
        copies = mesh.tp.size if fused.placement.dim is None else 1
        if fused.shard is None:
            copies *= mesh.dp_cp.size
        elif fused.shard.over != "dp":
            copies = 1
        copies *= 2 if fused.slices[0].parameter.role == "tied" and mesh.pp.size > 1 else 1
        by_copies[copies].append(fused.tensor.grad)
    for copies, gradients in by_copies.items():  # each process that holds the same rows adds its fraction
        # Norms need at least fp32: rounded to bf16, they would depend on the fusing and sharding of tensors.
        dtype = STATISTIC_DTYPE[gradients[0].dtype]
        squares += torch.stack(torch._foreach_norm(gradients, 2, dtype)).double().square().sum() / copies
    counted = targets if mesh.tp.rank == mesh.pp.rank == 0 else 0
    # Fill these tensors on the device: copying a number from the host would wait for all launched work.
    local = [loss.new_full((), x, dtype=torch.double) for x in (counted, _encode(flags))]
    text = () if cross_entropy is None else (cross_entropy / mesh.tp.size,)
    sums = torch.stack((loss.double() / mesh.tp.size, squares, *local, *text))
    if mesh.size > 1:
        sums = all_reduce(sums, mesh.everyone)
    return LaunchedStats(sums, tokens)


def reduce_flags(flags: StepFlags, mesh: Mesh) -> StepFlags:
    """Returns the union of the flags of all processes, for use outside a step. One all-reduce of one fp64 number."""
    if mesh.size == 1:
        return flags
    number = torch.tensor([_encode(flags)], dtype=torch.double, device=mesh.device)
    return _decode(all_reduce(number, mesh.everyone).item())


_FLAG_BITS = 16
"""Bits per flag in the reduced number, enough to count 65535 processes. The last flag, which only one process raises,
gets the rest of fp64's 53 bits."""


def _encode(flags: StepFlags) -> int:
    """Encodes flags as a number, one digit per flag. The numbers' sum over processes shows which flags were raised."""
    return sum(1 << _FLAG_BITS * i for i, flag in enumerate(StepFlags) if flag in flags)


def _decode(total: float) -> StepFlags:
    raised = StepFlags.NONE
    for i, flag in enumerate(StepFlags):
        if int(total) >> _FLAG_BITS * i & (1 << _FLAG_BITS) - 1:
            raised |= flag
    return raised


def clip_gradients(parameters: Iterable[nn.Parameter], stats: StepStats, max_norm: float) -> None:
    """Scales gradients in place: first to the mean over targets, then to a global norm of at most `max_norm` (0: no limit)."""
    factor = stats.scale
    if max_norm and stats.gradient_norm > max_norm:
        factor *= max_norm / stats.gradient_norm
    if factor != 1:
        torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], factor)
