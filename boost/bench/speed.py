"""How fast this machine is: GEMMs, attention, what moves bytes, and collectives, each measured over a range of sizes.

What is measured is what a training step does: torch's own kernels through autograd's entry points, outputs newly allocated.
"""

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

from boost.parallel import collectives
from boost.parallel.mesh import Axis, Mesh
from boost.plan.work import LOOKUP, LOSS, OPTIMIZER, REDUCE, SILU, SILU_BACKWARD, STREAM

SAMPLES = 7
"""Timed samples of each point; their median counts."""

LEAST_SECONDS = 2e-3
"""A sample repeats its operation until it takes about so long."""

Call = Callable[[], object]


@dataclass(frozen=True)
class Point:
    """One measured operation."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """GEMM: (m, n, k); attention: (sequences, heads, tokens, width of a head); else (bytes,) read and written, or of payload."""
    seconds: float


class Stopwatch:
    """Times calls while the other processes of the mesh do the same, or wait."""

    def __init__(self, mesh: Mesh, samples: int = SAMPLES, least: float = LEAST_SECONDS) -> None:
        self.mesh, self.samples, self.least = mesh, samples, least

    def seconds(self, call: Call, collective: bool = False) -> float:
        """Median seconds of one call. All processes must time the same things in the same order."""
        self._wait()
        call()
        once = self._sample(call, 1)
        repeats = max(1, min(math.ceil(self.least / max(once, 1e-7)), 1000))
        if collective:  # all processes repeat it equally often
            repeats = int(collectives.all_reduce(torch.tensor(float(repeats)), _world(self.mesh)) / self.mesh.size)
        return statistics.median(self._sample(call, repeats) for _ in range(self.samples))

    def _sample(self, call: Call, repeats: int) -> float:
        self._wait()
        begun = time.perf_counter()
        for _ in range(repeats):
            call()
        self._wait()
        return (time.perf_counter() - begun) / repeats

    def _wait(self) -> None:
        if self.mesh.device.type == "cuda":
            torch.cuda.synchronize()


def gemm_points(watch: Stopwatch, dtype: torch.dtype, largest: int, tokens: Sequence[int]) -> Iterator[Point]:
    """Products of a linear, forward and both backward, at widths up to `largest`."""
    device = watch.mesh.device
    widths = [64 * 2**i for i in range(int(math.log2(largest / 64)) + 1)]
    for t in tokens:
        for n, k in itertools.product(widths, widths):
            # Both thin ones and square ones; not every pair.
            if n * k > largest**2 / 2 or (n * k * t < 2**22) or (widths.index(n) + widths.index(k)) % 2:
                continue
            x_TK, w_NK = torch.randn(t, k, device=device, dtype=dtype), torch.randn(n, k, device=device, dtype=dtype)
            dy_TN = torch.randn(t, n, device=device, dtype=dtype)
            yield _point("gemm", dtype, (t, n, k), watch.seconds(partial(torch.mm, x_TK, w_NK.t())))
            yield _point("gemm", dtype, (t, k, n), watch.seconds(partial(torch.mm, dy_TN, w_NK)))
            yield _point("gemm", dtype, (n, k, t), watch.seconds(partial(torch.mm, dy_TN.t(), x_TK)))


def attention_points(watch: Stopwatch, dtype: torch.dtype, lengths: Sequence[int], tokens: int) -> Iterator[Point]:
    """Forward and backward of causal attention, at several widths of a head and lengths of `tokens` tokens."""
    for head_dim, length in itertools.product((32, 64, 128), lengths):
        shape = (max(tokens // length, 1), 256 // head_dim, length, head_dim)
        q, k, v = (_head(shape, dtype, watch.mesh.device) for _ in range(3))
        forward = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
        with torch.no_grad():
            yield _point("attention", dtype, shape, watch.seconds(forward))
        a = forward()
        d = torch.randn_like(a)
        backward = partial(torch.autograd.grad, a, (q, k, v), d, retain_graph=True)
        yield _point("attention backward", dtype, shape, watch.seconds(backward))


def _head(shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As linears make it: heads side by side in a row."""
    sequences, heads, length, width = shape
    made = torch.randn(sequences, length, heads, width, dtype=dtype, device=device)
    return made.transpose(1, 2).requires_grad_()


def kernel_points(watch: Stopwatch, dtype: torch.dtype, sizes: Sequence[int]) -> Iterator[Point]:
    """Operations that move bytes, at `sizes` bytes of one tensor. Bytes are counted as `boost.plan.work` counts them."""
    device, width = watch.mesh.device, 512
    for size in sizes:
        elements = size // dtype.itemsize
        x, y = (torch.randn(elements // width, width, dtype=dtype, device=device) for _ in range(2))
        row, column = x[0].clone(), x[:, :1].clone()
        half = x[:, : width // 2]
        adds: list[tuple[int, Call]] = [
            (3, partial(torch.add, x, y)),
            (2, partial(torch.mul, x, row)),
            (2, partial(torch.mul, x, column)),
            (2, partial(torch.cat, (half, half), dim=-1)),
            (3, partial(torch.mul, x, y)),
        ]
        moved = sum(times for times, _ in adds) * size
        spent = sum(watch.seconds(call) for _, call in adds)
        yield _point(STREAM, dtype, (moved // len(adds),), spent / len(adds))
        yield _point(SILU, dtype, (2 * size,), watch.seconds(partial(F.silu, x)))
        silu_backward = partial(torch.ops.aten.silu_backward, y, x)
        yield _point(SILU_BACKWARD, dtype, (3 * size,), watch.seconds(silu_backward))
        sums: list[Call] = [
            partial(torch.sum, x, 0),
            partial(torch.sum, x, -1),
            partial(torch.linalg.vector_norm, x, dim=-1),
        ]
        yield _point(REDUCE, dtype, (size,), sum(map(watch.seconds, sums)) / 3)
        # exp_ would run off to infinity if it were repeated on its own result.
        logsumexp, exp = partial(torch.logsumexp, x, -1), partial(torch.exp, x, out=torch.empty_like(x))
        yield _point(LOSS, dtype, (3 * size // 2,), (watch.seconds(logsumexp) + watch.seconds(exp)) / 2)
        tokens = torch.randint(0, x.shape[0], (x.shape[0],), device=device)
        yield _point(LOOKUP, dtype, (2 * size,), watch.seconds(partial(F.embedding, tokens, x)))
        yield _point(OPTIMIZER, dtype, (7 * size,), watch.seconds(_adamw(x)))


def _adamw(like: Tensor) -> Call:
    weight = like.clone().requires_grad_()
    weight.grad = torch.randn_like(like)
    optimizer = torch.optim.AdamW([weight], lr=1e-6, fused=True)
    return optimizer.step


def collective_points(watch: Stopwatch, dtype: torch.dtype, sizes: Sequence[int]) -> Iterator[Point]:
    """Every kind of collective over all processes, at `sizes` bytes of payload as `config.traffic.Collective` says it."""
    mesh = watch.mesh
    axis, p = _world(mesh), mesh.size
    for size in sizes:
        elements = max(size // dtype.itemsize // p * p, p)
        whole = torch.randn(elements, dtype=dtype, device=mesh.device)
        part = whole[: elements // p].clone()
        calls: dict[str, Call] = {
            "all-reduce": partial(collectives.all_reduce, whole, axis),
            "all-gather": partial(collectives.all_gather, part, axis),
            "reduce-scatter": partial(collectives.reduce_scatter, whole, axis),
            "all-to-all": partial(collectives.all_to_all, whole, axis),
        }
        for kind, call in calls.items():
            seconds = watch.seconds(call, collective=True)
            yield _point(kind, dtype, (elements * dtype.itemsize,), seconds)


def _world(mesh: Mesh) -> Axis:
    return Axis(mesh.rank, mesh.size, torch.distributed.group.WORLD)


def _point(name: str, dtype: torch.dtype, shape: tuple[int, ...], seconds: float) -> Point:
    return Point(name, str(dtype).removeprefix("torch."), shape, seconds)
