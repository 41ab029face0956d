"""Measures bandwidth and latency of every collective on each axis, and compares them with a hardware profile."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from boost.config.traffic import Collective
from boost.format import format_bytes
from boost.measure.speed import Point, Stopwatch, collective_points
from boost.measure.verify.report import Found, Verifier
from boost.parallel.mesh import Axis
from boost.plan.hardware import Hardware, Link

SIZES = {"cpu": (1 << 12, 1 << 18, 1 << 22), "cuda": (1 << 14, 1 << 20, 1 << 24, 1 << 28)}
"""Payload bytes by device type."""

SAMPLES = 5
SLOW = 2.0
"""A collective that is slower than the profile by more than this factor is reported."""


def verify(verifier: Verifier, axes: dict[str, Axis], dtype: torch.dtype, hardware: Hardware | None) -> None:
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
            lambda axis=axis: list(collective_points(watch, dtype, SIZES[mesh.device.type], axis)),  # type: ignore[misc]
            partial(_judged, processes=axis.size, link=link),
            "check the interfaces above (NCCL_SOCKET_IFNAME, NCCL_DEBUG=INFO); if this is the machine's normal speed, run "
            "boost plan calibrate",
        )


def _judged(by_rank: Sequence[Sequence[Point]], processes: int, link: Link | None) -> Found:
    """Judges the points of rank 0: bandwidth at the largest payload, latency at the smallest, and the ratio to the profile."""
    points = by_rank[0]
    smallest, largest = (choose(point.shape[0] for point in points) for choose in (min, max))
    rates = {p.name: _sent(p, processes) / p.seconds / 1e9 for p in points if p.shape[0] == largest}
    latency = min(p.seconds for p in points if p.shape[0] == smallest)
    detail = f"{latency * 1e6:,.0f} us; GB/s at {format_bytes(largest)}: " + ", ".join(
        f"{name} {rate:.2g}" for name, rate in rates.items()
    )
    numbers: dict[str, Any] = {
        "points": [{"kind": p.name, "dtype": p.dtype, "bytes": p.shape[0], "seconds": p.seconds} for p in points]
    }
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
        return Found("note", f"{detail}, {kind} at {format_bytes(largest)} {worst:.1f}x", numbers=numbers)
    return Found("ok", detail, numbers=numbers)


def _sent(point: Point, processes: int) -> int:
    """Bytes that one process sends."""
    elements = point.shape[0] // getattr(torch, point.dtype).itemsize
    return Collective("forward", point.name, (elements,), point.dtype, processes).sent_bytes
