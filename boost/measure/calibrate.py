"""`boost plan calibrate`: measures a hardware profile for this machine in a minute or two.

All processes measure at the same time, as in training, then one process measures alone. The cost model of
`boost.plan.hardware` is fitted to the measured points, and the fit error is printed.
"""

import itertools
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import tomli_w
import torch
from torch.utils._pytree import MappingKey, tree_flatten_with_path

from boost.config.load import from_tree
from boost.config.schema import ParallelConfig
from boost.files import replace_text, storage_errors
from boost.machine import cpu_model
from boost.measure.speed import Point, Stopwatch, attention_points, collective_points, gemm_points, kernel_points
from boost.measure.steps import time_passes
from boost.parallel.mesh import Mesh
from boost.plan.hardware import Hardware, HostTime
from boost.plan.timing import Predictor
from boost.plan.work import ATTENTION, GEMM
from boost.text import JsonObject
from boost.train.agreement import run_on_main
from boost.train.hardware import total_memory
from boost.train.progress import progress
from boost.train.rendezvous import close_mesh, open_mesh, world_size

PROCESSES = "together"
ALONE = "alone"

FIT_ERROR, WORST_FIT_ERROR = 0.2, 0.5
"""Mean error of the GEMM fit: thresholds for a warning and for rejecting the profile."""

DRIFT, WORST_DRIFT = 1.5, 4.0
"""Slowdown of the probe during calibration: thresholds for a warning and for rejecting the profile."""

LEAST_GB_S = 0.01
"""Minimum plausible bandwidth of memory and links in GB/s. A lower value includes waiting time."""

LEAST_TFLOPS = 1e-4
"""Minimum plausible speed of large GEMMs in TFLOP/s."""


def calibrate_process(dtypes: Sequence[str], device: str, quick: bool, out: Path, force: bool = False) -> int:
    """Runs the calibration on one process and returns the exit code.

    The main process writes the profile. A useless profile is rejected, with exit code 1 on all processes, unless
    `force` is true. Raises StorageError if the profile cannot be written.
    """
    mesh = open_mesh(ParallelConfig(layout="single", dp=world_size()), device)
    watch = Stopwatch(mesh, samples=3 if quick else 7)
    together = _sweep(watch, dtypes, quick, "all processes at once" if mesh.size > 1 else "one process")
    points, probes, links = {PROCESSES: together}, {PROCESSES: watch.reference}, list[Point]()
    if mesh.size > 1:
        if mesh.is_main:
            alone = Stopwatch(mesh, samples=watch.samples)
            points[ALONE] = _sweep(alone, dtypes, quick, "one process alone")
            probes[ALONE] = alone.reference
        mesh.barrier()
        sizes = [2**n for n in (range(6, 27, 2) if not quick else range(8, 15, 3))]
        for name in progress(list(dtypes), "collectives", enabled=mesh.is_main):
            links += collective_points(watch, getattr(torch, name), sizes)
    if mesh.is_main:
        profile = profile_of(mesh, points, probes, links)
        profile["host_us"] = _host_us(mesh, profile)
    mesh.barrier()
    drift, refused = watch.probe.least(10) / watch.reference, False
    if mesh.is_main:
        errors = [
            (f"{kind}, {dtype}", fit_gemm(_gemms(sweep, dtype))[1])
            for kind, sweep in points.items()
            for dtype in sorted({point.dtype for point in sweep})
        ]
        doubts = list(problems(profile, errors, drift))
        profile["sources"] += [f"warning: {words}" for words, _ in doubts]
        refused = any(serious for _, serious in doubts) and not force
        for words, serious in doubts:
            print(f"{'error' if serious else 'warning'}: {words}", file=sys.stderr)
        if refused:
            print(
                f"{out} was not written; keep the machine idle and calibrate again, or use --force to write it anyway",
                file=sys.stderr,
            )
        else:
            with storage_errors(out.parent):
                out.parent.mkdir(parents=True, exist_ok=True)
                replace_text(out, tomli_w.dumps(profile))
            print(summary(Hardware.model_validate(profile), points, out))
    refused = run_on_main(mesh, lambda: refused)
    mesh.barrier()
    close_mesh()
    return int(refused)


def _gemms(points: Sequence[Point], dtype: str) -> list[Point]:
    return [p for p in points if p.name == GEMM and p.dtype == dtype]


def profile_of(
    mesh: Mesh, points: dict[str, list[Point]], probes: dict[str, float], links: Sequence[Point]
) -> JsonObject:
    """Returns the profile in its file format, with host_us = 0. `probes`: shortest time of the probe in seconds, by sweep."""
    cuda, count = mesh.device.type == "cuda", torch.get_num_threads()
    device = torch.cuda.get_device_name(mesh.device) if cuda else cpu_model()
    threads = "" if cuda else f" of {count} {'thread' if count == 1 else 'threads'}"
    total = total_memory(mesh.device) / (1 if cuda else mesh.size)
    link = {"name": "NVLink or PCIe" if cuda else "loopback", "processes": max(mesh.size, 2)} | _link(links, mesh.size)
    profile: JsonObject = {
        "title": f"{device}, {'1 process' if mesh.size == 1 else f'{mesh.size} processes'}{threads}",
        "device": mesh.device.type,
        "per_node": mesh.size,
        "memory_gb": round(total / 1e9, 2),
        "reserve_gb": 2.0 if cuda else 0.5,
        "communicator_gb": 0.8 if cuda else 0.0,
        "host_us": 0.0,
        # Gloo's threads run on the same cores as the model.
        "overlap": 0.8 if cuda else 0.0,
        "sources": ["measured by boost plan calibrate"],
        "provenance": {
            "": "calibrated",
            "reserve_gb": "estimate",
            "communicator_gb": "estimate",
            "overlap": "estimate",
            "host_us.step": "estimate",
        }
        | ({"network": "estimate"} if mesh.size > 1 else {"node": "estimate", "network": "estimate"}),
        "speeds": _speeds(points[PROCESSES], probes[PROCESSES]),
        "node": link,
        "network": link,
    }
    if ALONE in points:
        profile["alone"] = _speeds(points[ALONE], probes[ALONE])
    return profile


def fit_gemm(points: Sequence[Point]) -> tuple[JsonObject, float]:
    """Fits `GemmSpeed` to measured times. Returns (parameters, mean error).

    Minimizes the absolute error of log time by coordinate descent with shrinking steps. Absolute errors are robust to outliers on a
    busy machine. Points are weighted by the square root of their time, since a step spends most of its time in large GEMMs.
    """
    shapes = np.array([p.shape for p in points], float)
    seconds = np.array([p.seconds for p in points])
    rates = 2 * shapes.prod(1) / seconds
    weights = np.sqrt(seconds)

    def error(constants: np.ndarray) -> float:
        law = constants[0] + np.log(shapes / (shapes + np.exp(constants[1:]))).sum(1)
        return float((weights * np.abs(law - np.log(rates))).sum() / weights.sum())

    best, step = np.array([math.log(rates.max()), 2.0, 2.0, 2.0]), 1.0
    least = error(best)
    while step > 1e-3:
        tried = [best + direction * step * axis for axis in np.eye(len(best)) for direction in (1, -1)]
        errors = [error(constants) for constants in tried]
        if min(errors) < least:
            least = min(errors)
            best = tried[errors.index(least)]
        else:
            step /= 2
    peak = float(rates.max())
    half = [round(float(x), 1) if x >= 0.5 else 0.0 for x in np.exp(best[1:])]
    speed = {"tflops": round(peak / 1e12, 5), "fraction": round(float(np.exp(best[0])) / peak, 4), "half": half}
    return speed, error(best)


def _speeds(points: Sequence[Point], probe: float) -> JsonObject:
    by_name: dict[str, list[Point]] = defaultdict(list)
    for point in points:
        by_name[f"{point.name} {point.dtype}"].append(point)
    dtypes = sorted({point.dtype for point in points})
    kernels = {
        name: [[float(p.shape[0]), round(p.seconds * 1e6, 3)] for p in sorted(measured, key=lambda p: p.shape)]
        for name, measured in by_name.items()
        if not name.startswith((GEMM, ATTENTION))
    }
    largest = max((p for p in points if p.name == "elementwise"), key=lambda p: p.shape[0])
    return {
        "memory_gb_s": _gb_s(largest.shape[0] / largest.seconds),
        "memory_fraction": 1.0,
        "kernel_us": 0.0,
        "probe_us": round(probe * 1e6, 1),
        "gemm": {dtype: fit_gemm(by_name[f"{GEMM} {dtype}"])[0] for dtype in dtypes},
        "attention": {dtype: _attention(by_name, dtype) for dtype in dtypes},
        "kernels": kernels,
    }


def _attention(by_name: dict[str, list[Point]], dtype: str) -> list[dict[str, float]]:
    """Attention speed for each head dimension: a linear fit of time per score over sequence lengths."""
    result = []
    forward, backward = (by_name[f"{name} {dtype}"] for name in ("attention", "attention backward"))
    for head_dim in sorted({point.shape[3] for point in forward}):
        speeds, halves = [], []
        for products, points in ((2, forward), (5, backward)):
            of_width = [point for point in points if point.shape[3] == head_dim]
            # flops / (rate S / (S + half)) is linear in S at equal token counts, with (1 + half / S) / rate seconds per unit.
            lengths = np.array([point.shape[2] for point in of_width], float)
            costs = np.array([p.seconds / (products * math.prod(p.shape) * p.shape[2]) for p in of_width])
            slope, constant = np.polyfit(1 / lengths, costs, 1, w=1 / costs)
            constant = max(constant, costs.min() / 4)
            speeds.append(1 / constant)
            halves.append(max(slope / constant, 0.0))
        half = statistics.mean(halves)
        tflops = [round(speed / 1e12, 5) for speed in speeds]
        result.append({"head_dim": head_dim, "forward": tflops[0], "backward": tflops[1], "half": round(half, 1)})
    return result


def _gb_s(bytes_per_second: float) -> float:
    """Converts to GB/s with four significant digits, so that a very slow link on a busy machine does not become 0."""
    gb_s = bytes_per_second / 1e9
    return float(f"{gb_s:.4g}")


def _link(points: Sequence[Point], processes: int) -> JsonObject:
    """Measured collectives, and a latency and a bandwidth for all others."""
    if not points:
        return {"latency_us": 0.0, "gb_s": 1.0, "known": False}
    measured: dict[str, list[list[float]]] = defaultdict(list)
    for point in sorted(points, key=lambda p: p.shape):
        measured[f"{point.name} {point.dtype}"].append([float(point.shape[0]), round(point.seconds * 1e6, 2)])
    sums = [point for point in points if point.name == "all-reduce"]
    least, most = min(sums, key=lambda p: p.shape), max(sums, key=lambda p: p.shape)
    gathers = [point for point in points if point.name == "all-gather" and point.shape == most.shape]
    return {
        "latency_us": round(least.seconds * 1e6, 2),
        # A send to a neighbor has the speed of a gather, which sends its payload minus the local shard.
        "gb_s": _gb_s(most.shape[0] * (processes - 1) / processes / min(p.seconds for p in gathers)),
        "measured": dict(measured),
    }


def _sweep(watch: Stopwatch, dtypes: Sequence[str], quick: bool, title: str) -> list[Point]:
    cuda = watch.mesh.device.type == "cuda"
    largest = (8192 if cuda else 2048) if not quick else 256
    tokens = ((4096, 16384) if cuda else (256, 1024, 2048)) if not quick else (256,)
    lengths = ((1024, 4096) if cuda else (128, 256, 512, 1024)) if not quick else (64, 128)
    sizes = [2**n for n in (range(14, 29 if cuda else 25, 2) if not quick else range(14, 19, 2))]
    sweeps: list[Iterable[Point]] = []
    for name in dtypes:
        dtype = getattr(torch, name)
        sweeps += [
            gemm_points(watch, dtype, largest, tokens),
            attention_points(watch, dtype, lengths, 16384 if cuda else 1024),
            kernel_points(watch, dtype, sizes),
        ]
    return list(itertools.chain.from_iterable(progress(sweeps, f"sweeps, {title}", enabled=watch.mesh.is_main)))


def _host_us(mesh: Mesh, profile: JsonObject) -> dict[str, float]:
    """Host microseconds per operation by what is compiled, from the step time of a model with almost no work, minus the time for
    that work. CPUs compile nothing by default, so other values of train.compile are not measured there."""
    model = {"dim": 64, "ffn_dim": 128, "heads": 2, "layers": 4, "vocab_size": 256, "rank": 16}
    train = {"micro_batch": 1, "global_batch": 1, "seq_len": 32}
    found: dict[str, float] = {}
    for part in ("none", "kernels", "blocks") if profile["device"] == "cuda" else ("none",):
        tiny = from_tree({"model": model, "parallel": {"layout": "single"}, "train": train | {"compile": part}})
        measured = statistics.median(time_passes(tiny, mesh.device, rounds=30))
        (once,) = Predictor(Hardware.model_validate(profile)).passes(tiny)
        # On a CPU, the host also runs the operations; a GPU runs them concurrently.
        work = once.total if profile["device"] == "cpu" else 0.0
        found[part] = max(round((measured - work) / once.calls * 1e6, 2), 0.0)
    return dict.fromkeys(HostTime.model_fields, found["none"]) | found


def summary(hardware: Hardware, points: dict[str, list[Point]], out: Path) -> str:
    lines = [f"{hardware.title}: {out}"]
    for kind, sweep in points.items():
        for dtype in sorted({point.dtype for point in sweep}):
            gemms = _gemms(sweep, dtype)
            speed, error = fit_gemm(gemms)
            lines.append(
                f"  {kind:<9} {dtype}: large GEMMs {speed['tflops'] * speed['fraction'] * 1e3:,.0f} GFLOP/s, best "
                f"{speed['tflops'] * 1e3:,.0f}; {len(gemms)} shapes, mean fit error {error:.0%}"
            )
    host = hardware.host_us
    by_mode = f"{host.none:.1f} us" + (
        f" ({host.kernels:.1f} with compiled kernels, {host.blocks:.1f} in compiled blocks)" if hardware.is_gpu else ""
    )
    lines.append(f"  memory {hardware.speeds.memory_gb_s:.1f} GB/s; host {by_mode} per operation")
    if hardware.node.measured:
        lines.append(f"  {hardware.node.name}: {hardware.node.latency_us:.0f} us, {hardware.node.gb_s:.2f} GB/s")
    return "\n".join(lines)


# A noisy profile would give useless plans.


def problems(profile: JsonObject, fit_errors: Sequence[tuple[str, float]], drift: float) -> Iterator[tuple[str, bool]]:
    """Yields the problems in a profile, given in its file format, and whether each makes the profile useless.

    `fit_errors`: mean error of the GEMM fit, by '<sweep>, <dtype>'. `drift`: the probe's time after the calibration, divided by
    its time before.
    """
    for path, number in tree_flatten_with_path(profile)[0]:
        if isinstance(number, int | float) and (not math.isfinite(number) or number < 0):
            name = ".".join(key.key for key in path if isinstance(key, MappingKey))
            yield f"{name} = {number:g} is not a valid speed", True
    for sweep in [profile["speeds"], *([profile["alone"]] if "alone" in profile else [])]:
        for dtype, speed in sweep["gemm"].items():
            if (reached := speed["tflops"] * speed["fraction"]) < LEAST_TFLOPS:
                yield f"{dtype} GEMMs reach only {reached * 1e3:.3g} GFLOP/s", True
        if sweep["memory_gb_s"] < LEAST_GB_S:
            yield f"memory bandwidth is only {sweep['memory_gb_s']:.3g} GB/s", True
    link = profile["node"]
    if link.get("known", True) and link["gb_s"] < LEAST_GB_S:
        yield f"{link['name']} sends only {link['gb_s']:.2g} GB/s between processes", True
    for name, error in fit_errors:
        if not error < FIT_ERROR:
            yield f"the GEMM fit has a mean error of {error:.0%} ({name})", not error < WORST_FIT_ERROR
    if not drift < DRIFT:
        yield f"the machine slowed down by a factor of {drift:.1f} during calibration", not drift < WORST_DRIFT
