"""Measures this machine's speed for GEMMs, attention, memory-bound operations and collectives, over a range of sizes.

Operations run as in a training step: autograd's calls to torch's kernels, with newly allocated outputs.
"""

import collections
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from boost.parallel import collectives as sent
from boost.parallel.mesh import Axis, Mesh
from boost.plan import work

SAMPLES = 7
"""Timed samples per point. The median is used."""

LEAST_SECONDS = 2e-3
"""Target duration of a sample in seconds, reached by repeating the operation."""

RING_BYTES = 2**25
"""Bytes of recent outputs to keep alive: more than the caches hold, like a step's activations."""

Call = Callable[[], object]


@dataclass(frozen=True)
class Point:
    """One measured operation."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """GEMM: (m, n, k). Attention: (sequences, heads, tokens, head dimension). Otherwise: (bytes read and written, or payload,)."""
    seconds: float


class Probe:
    """A small fixed workload of GEMMs and sums, timed before and after a measurement.

    The speed of shared cores varies over time by up to 50%; the probe shows the variation.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._a, self._b = (torch.randn(512, 512, device=device) for _ in range(2))
        self._x, self._y = (torch.randn(1024, 1024, device=device) for _ in range(2))

    def seconds(self) -> float:
        """Times the workload once, in seconds; it takes a few milliseconds on one core."""
        synchronize(self.device)
        begun = time.perf_counter()
        for _ in range(3):
            torch.mm(self._a, self._b)
            torch.add(self._x, self._y)
        synchronize(self.device)
        return time.perf_counter() - begun

    def least(self, times: int = 30) -> float:
        """Time of the fastest of `times` runs, in seconds."""
        return min(self.seconds() for _ in range(times))


def synchronize(device: torch.device) -> None:
    """Waits until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Stopwatch:
    """Times calls while the other processes in the mesh do the same, or wait.

    On CPUs, times are scaled with the probe to the machine's top speed when the stopwatch was created. GPU times are not scaled:
    a GPU is not shared, and its probe would measure launches and clocks that rise under load.
    """

    def __init__(self, mesh: Mesh, samples: int = SAMPLES) -> None:
        self.mesh, self.samples = mesh, samples
        self.probe = Probe(mesh.device)
        self.reference = self.probe.least()

    def seconds(self, call: Call, collective: bool = False) -> float:
        """Median seconds for one call. All processes must time the same calls in the same order."""
        call()
        once = self._sample(call, 1)
        repeats = max(1, min(math.ceil(LEAST_SECONDS / max(once, 1e-7)), 1000))
        if collective:  # the same number of repetitions on all processes
            total = sent.all_reduce(torch.tensor(float(repeats), device=self.mesh.device), self.mesh.everyone)
            repeats = int(total / self.mesh.size)
        is_shared = self.mesh.device.type == "cpu"
        before = self.probe.seconds() if is_shared else 0.0
        median = statistics.median(self._sample(call, repeats) for _ in range(self.samples))
        if not is_shared:
            return median
        return median * 2 * self.reference / (before + self.probe.seconds())

    def _sample(self, call: Call, repeats: int) -> float:
        synchronize(self.mesh.device)
        begun = time.perf_counter()
        for _ in range(repeats):
            call()
        synchronize(self.mesh.device)
        return (time.perf_counter() - begun) / repeats


def gemm_points(watch: Stopwatch, dtype: torch.dtype, largest: int, tokens: Sequence[int]) -> Iterator[Point]:
    """GEMMs for a linear, one forward and two backward, at widths up to `largest`."""
    device = watch.mesh.device
    # Latents in a small model at TP 8 have width 32, at which CPUs lose a quarter of their speed; GPUs pad to tiles of 64.
    least = 32 if device.type == "cpu" else 64
    widths = [least * 2**i for i in range(int(math.log2(largest / least)) + 1)]
    for t in tokens:
        for n, k in itertools.product(widths, widths):
            # Thin and square shapes, but not every pair.
            if n * k > largest**2 / 2 or (n * k * t < 2**22) or (widths.index(n) + widths.index(k)) % 2:
                continue
            x_TK, w_NK = torch.randn(t, k, device=device, dtype=dtype), torch.randn(n, k, device=device, dtype=dtype)
            dy_TN = torch.randn(t, n, device=device, dtype=dtype)
            yield _point("gemm", dtype, (t, n, k), watch.seconds(partial(torch.mm, x_TK, w_NK.t())))
            yield _point("gemm", dtype, (t, k, n), watch.seconds(partial(torch.mm, dy_TN, w_NK)))
            yield _point("gemm", dtype, (n, k, t), watch.seconds(partial(torch.mm, dy_TN.t(), x_TK)))


def attention_points(watch: Stopwatch, dtype: torch.dtype, lengths: Sequence[int], tokens: int) -> Iterator[Point]:
    """Causal attention, forward and backward, at several head dimensions and sequence lengths, with `tokens` tokens in total."""
    for head_dim, length in itertools.product((32, 64, 128), lengths):
        shape = (max(tokens // length, 1), 256 // head_dim, length, head_dim)
        sequences, heads, _, _ = shape
        # Use the memory layout of a linear's output: heads side by side in each row.
        q, k, v = (
            torch.randn(sequences, length, heads, head_dim, dtype=dtype, device=watch.mesh.device)
            .transpose(1, 2)
            .requires_grad_()
            for _ in range(3)
        )
        forward = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
        with torch.no_grad():
            yield _point("attention", dtype, shape, watch.seconds(forward))
        a = forward()
        d = torch.randn_like(a)
        backward = partial(torch.autograd.grad, a, (q, k, v), d, retain_graph=True)
        yield _point("attention backward", dtype, shape, watch.seconds(backward))


def kernel_points(watch: Stopwatch, dtype: torch.dtype, sizes: Sequence[int]) -> Iterator[Point]:
    """Memory-bound operations on tensors of `sizes` bytes. Bytes are counted as in `boost.plan.work`."""
    device, width = watch.mesh.device, 512
    for size in sizes:
        rows = size // dtype.itemsize // width
        x, y = (torch.randn(rows, width, dtype=dtype, device=device) for _ in range(2))
        row, column = x[0].clone(), x[:, :1].clone()
        heads = x.view(8, rows // 8, 8, width // 8).transpose(1, 2)  # memory layout at the rotary embedding
        streams: list[Call] = [partial(torch.add, x, y), x.clone]
        streams += [partial(torch.mul, x, factor) for factor in (row, column)]
        streams.append(partial(torch.mul, heads, heads[0].contiguous()))
        streams.append(partial(torch.cat, heads.chunk(2, dim=-1)[::-1], dim=-1))
        sums: list[Call] = [partial(torch.sum, x, dim) for dim in (0, -1)]
        sums.append(partial(torch.linalg.vector_norm, x, dim=-1))
        weights = [x.clone().requires_grad_() for _ in range(_TOGETHER)]
        for weight in weights:
            weight.grad = torch.randn_like(x)
        measured: dict[str, tuple[float, list[Call]]] = {
            work.STREAM: (13 / 6, streams),
            work.REORDER: (8 / 3, _reorderings(x, work.SHORT_RUN)),
            work.REORDER_FINELY: (8 / 3, _reorderings(x, work.SHORT_RUN // 2)),
            work.SILU: (2.0, [partial(F.silu, x)]),
            work.SILU_BACKWARD: (3.0, [partial(torch.ops.aten.silu_backward, y, x)]),
            work.REDUCE: (1.0, sums),
            work.LOSS: (1.5, [partial(torch.logsumexp, x, -1), partial(torch.exp, x, out=torch.empty_like(x))]),
            work.LOOKUP: (2.0, [partial(F.embedding, torch.randint(0, rows, (rows,), device=device), x)]),
            work.OPTIMIZER: (7.0 * _TOGETHER, [torch.optim.AdamW(weights, lr=1e-6, fused=True).step]),
        }
        # Keep the last results alive, so that outputs go to uncached memory, as activations do.
        results = collections.deque[object](maxlen=max(2, min(RING_BYTES // size, 64)))
        for kernel, (times, calls) in measured.items():
            kept = [partial(lambda call, results: results.append(call()), call, results) for call in calls]
            spent = sum(watch.seconds(call) for call in kept) / len(calls)
            yield _point(kernel, dtype, (round(times * size),), spent)


_TOGETHER = 4
"""Number of tensors that the optimizer updates in one operation."""


def _reorderings(x: Tensor, run: int) -> list[Call]:
    """Reorders shards with `run` elements per row: from stacked to side by side, back, and back for two tensors at once."""
    rows, count = x.shape[0], x.shape[1] // run
    below, beside = x.view(count, rows, run), x.view(rows, count, run).transpose(0, 1)
    return [below.transpose(0, 1).contiguous, beside.contiguous, partial(torch.cat, (beside, beside), dim=-1)]


def collective_points(
    watch: Stopwatch, dtype: torch.dtype, sizes: Sequence[int], axis: Axis | None = None
) -> Iterator[Point]:
    """Every kind of collective over an axis (default: all processes), with payloads of `sizes` bytes, defined as in
    `config.traffic.Collective`."""
    mesh = watch.mesh
    axis = axis or mesh.everyone
    p = axis.size
    for size in sizes:
        elements = max(size // dtype.itemsize // p * p, p)
        whole = torch.randn(elements, dtype=dtype, device=mesh.device)
        part = whole[: elements // p].clone()
        calls: dict[str, Call] = {
            "all-reduce": partial(sent.all_reduce, whole, axis),
            "all-gather": partial(sent.all_gather, part, axis),
            "reduce-scatter": partial(sent.reduce_scatter, whole, axis),
            "all-to-all": partial(sent.all_to_all, whole, axis),
        }
        for kind, call in calls.items():
            seconds = watch.seconds(call, collective=True)
            yield _point(kind, dtype, (elements * dtype.itemsize,), seconds)


def _point(name: str, dtype: torch.dtype, shape: tuple[int, ...], seconds: float) -> Point:
    return Point(name, str(dtype).removeprefix("torch."), shape, seconds)
