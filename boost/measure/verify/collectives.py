"""Checks every collective: forward and backward against plain arithmetic, and bandwidth and latency on each axis.

Payloads are small integers with exact sums in every dtype, so results are compared bit for bit. Each process generates
the payloads of all processes and computes the expected results locally. Speeds are compared with a hardware profile.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from boost.config.layouts import spec
from boost.config.layouts.spec import Comm
from boost.config.traffic import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, Collective
from boost.format import format_bytes
from boost.measure.speed import Point, Stopwatch, collective_points
from boost.measure.verify.report import Found, Verifier
from boost.parallel import collectives
from boost.parallel.mesh import Axis
from boost.plan.hardware import Hardware, Link

COMMS: dict[str, Comm] = {name: value for name, value in vars(spec).items() if isinstance(value, Comm)}
"""Differentiable collectives by name."""

PLAIN: dict[str, Callable[[Tensor, Axis], Tensor]] = {
    ALL_REDUCE: collectives.all_reduce,
    ALL_GATHER: collectives.all_gather,
    REDUCE_SCATTER: collectives.reduce_scatter,
    ALL_TO_ALL: collectives.all_to_all,
}
"""Collectives without a gradient, by kind."""

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
SIZES = (1, 3, 4096)
"""Payload rows per process: one, an odd number, and more than gloo's buffers and NCCL's low-latency protocols hold."""

WIDTH = 5


def expected(kind: str | None, payloads: list[Tensor], rank: int) -> Tensor:
    """Computes the expected result on process `rank` from the payloads of all processes."""
    rows = payloads[0].shape[0] // len(payloads)
    if kind is None:
        return payloads[rank]
    if kind == ALL_GATHER:
        return torch.cat(payloads)
    if kind == ALL_TO_ALL:
        return torch.cat([payload.narrow(0, rank * rows, rows) for payload in payloads])
    total = torch.stack(payloads).double().sum(0).to(payloads[0].dtype)
    return total if kind == ALL_REDUCE else total.narrow(0, rank * rows, rows)


def wrong_functions(axis: Axis, dtype: torch.dtype, device: torch.device) -> list[str]:
    """Names of the functions whose results differ from plain arithmetic."""
    wrong = []
    for size in SIZES:
        payloads = _payloads(axis, size, dtype, device)
        own = payloads[axis.rank]
        for kind, function in PLAIN.items():
            if not torch.equal(function(own, axis), expected(kind, payloads, axis.rank)):
                wrong.append(kind)
        x = own.clone()
        collectives.start_all_reduce_(x, axis)
        collectives.wait(x)
        if not torch.equal(x, expected(ALL_REDUCE, payloads, axis.rank)):
            wrong.append("all-reduce in place")
        for name, comm in COMMS.items():
            for way, split in (("", False), (", started", True)):
                if not _differentiable(comm, split, axis, payloads):
                    wrong.append(f"{name}{way}")
    return wrong


def _payloads(axis: Axis, rows: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> list[Tensor]:
    """Payloads of all processes, [p rows, WIDTH] each, of integers so small that sums are exact in bfloat16."""
    largest = max(1, min(8, 128 // axis.size))
    made = []
    for rank in range(axis.size):
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        numbers = torch.randint(-largest, largest + 1, (axis.size * rows, WIDTH), generator=generator)
        made.append(numbers.to(device, dtype))
    return made


def _differentiable(comm: Comm, split: bool, axis: Axis, payloads: list[Tensor]) -> bool:
    x = payloads[axis.rank].clone().requires_grad_()
    y = collectives.start(comm, x, axis, split=split).wait()
    whole = expected(comm.forward, payloads, axis.rank)
    if not torch.equal(y, whole):
        return False
    gradients = [gradient[: y.shape[0]] for gradient in _payloads(axis, y.shape[0], y.dtype, y.device, seed=1)]
    y.backward(gradients[axis.rank])
    if comm.backward is None and comm.forward == ALL_GATHER:
        # The gradient is complete and identical on all processes, so each process takes its own rows.
        n = x.shape[0]
        due = gradients[axis.rank].narrow(0, axis.rank * n, n)
    else:
        due = expected(comm.backward, gradients, axis.rank)
    return x.grad is not None and torch.equal(x.grad, due)


def verify(verifier: Verifier, axes: dict[str, Axis], device: torch.device) -> None:
    """Runs one check per axis and dtype."""
    verifier.section("Collectives, forward and backward, against plain arithmetic")
    count = len(PLAIN) + 1 + 2 * len(COMMS)

    def judge(wrong_by_rank: list[list[str]]) -> Found:
        wrong = sorted({name for names in wrong_by_rank for name in names})
        if wrong:
            return Found("failed", f"wrong results from {', '.join(wrong)}", numbers={"wrong": wrong})
        return Found("ok", f"results of {count} functions with {', '.join(map(str, SIZES))} rows are bitwise equal")

    for name, axis in axes.items():
        for dtype in DTYPES:
            words = str(dtype).removeprefix("torch.")
            verifier.check(
                f"{name} ({axis.size} processes), {words}",
                partial(wrong_functions, axis, dtype, device),
                judge,
                "do not train on these machines: check the drivers, NCCL and the network of the failing ranks",
            )


PAYLOADS = {"cpu": (1 << 12, 1 << 18, 1 << 22), "cuda": (1 << 14, 1 << 20, 1 << 24, 1 << 28)}
"""Payload bytes by device type."""

SAMPLES = 5
SLOW = 2.0
"""Collectives slower than the profile by more than this factor are reported."""


def verify_links(verifier: Verifier, axes: dict[str, Axis], dtype: torch.dtype, hardware: Hardware | None) -> None:
    """Runs one check per axis, over all kinds of collectives."""
    verifier.section("Links: latency, and bytes sent by each process per second")
    mesh = verifier.mesh
    watch = Stopwatch(mesh, samples=SAMPLES)
    for name, axis in axes.items():
        link = None
        if hardware:
            link = hardware.node if mesh.size <= hardware.per_node or name == "tp" else hardware.network
        verifier.check(
            f"{name} ({axis.size} processes)",
            lambda axis=axis: list(collective_points(watch, dtype, PAYLOADS[mesh.device.type], axis)),  # type: ignore[misc]
            partial(_judged, processes=axis.size, link=link),
            "check the interfaces above (NCCL_SOCKET_IFNAME, NCCL_DEBUG=INFO); if this is the machine's normal speed, run "
            "boost plan calibrate",
        )


def _judged(by_rank: Sequence[Sequence[Point]], processes: int, link: Link | None) -> Found:
    """Judges rank 0's points: bandwidth at the largest payload, latency at the smallest, and the ratio to the profile."""
    points = by_rank[0]
    smallest, largest = (choose(point.shape[0] for point in points) for choose in (min, max))
    rates = {p.name: _sent(p, processes) / p.seconds / 1e9 for p in points if p.shape[0] == largest}
    latency = min(p.seconds for p in points if p.shape[0] == smallest)
    each = ", ".join(f"{name} {rate:.2g}" for name, rate in rates.items())
    detail = f"{latency * 1e6:,.0f} us; GB/s at {format_bytes(largest)}: {each}"
    listed = [{"kind": p.name, "dtype": p.dtype, "bytes": p.shape[0], "seconds": p.seconds} for p in points]
    numbers: dict[str, object] = {"points": listed}
    if link is None or not link.known:
        return Found("ok", detail, numbers=numbers)
    ratios = {}
    for p in points:
        expected = link.seconds(p.name, p.dtype, p.shape[0], _sent(p, processes), processes)
        ratios[p.name, p.shape[0]] = p.seconds / expected
    worst, kind = max((ratio, kind) for (kind, size), ratio in ratios.items() if size == largest)
    typical = math.exp(sum(math.log(ratio) for ratio in ratios.values()) / len(ratios))
    detail += f"; {typical:.2f}x the profile's time"
    if worst > SLOW:
        return Found("note", f"{detail}, and {worst:.1f}x for {kind} at {format_bytes(largest)}", numbers=numbers)
    return Found("ok", detail, numbers=numbers)


def _sent(point: Point, processes: int) -> int:
    elements = point.shape[0] // getattr(torch, point.dtype).itemsize
    return Collective("forward", point.name, (elements,), point.dtype, processes).sent_bytes
