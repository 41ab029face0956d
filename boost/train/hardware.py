"""Hardware limits and utilization: peak FLOP/s, memory in use, model FLOPs utilization, and a device's clock."""

import math
import os
import resource
import sys
import time
import weakref

import torch

from boost.config.gpus import find_peak

_TERA = 1e12


def peak_flops(device: torch.device, compute_dtype: torch.dtype, override_tflops: float = 0.0) -> float:
    """Peak FLOP/s of one device in `compute_dtype`: `override_tflops` if not 0, else from boost/config/gpus.toml.

    nan for a CPU, which has no published peak, and for a GPU that is not in the table. In these cases, set run.peak_tflops.
    """
    if override_tflops > 0:
        return override_tflops * _TERA
    if device.type == "cuda":
        return gpu_peak_flops(torch.cuda.get_device_name(device), compute_dtype)
    return math.nan


def gpu_peak_flops(name: str, compute_dtype: torch.dtype) -> float:
    """Peak FLOP/s of the GPU called `name`; nan if it is not in the table, or for a laptop variant or a MIG slice."""
    peak = find_peak(name)
    if peak is None:
        return math.nan
    tflops = peak.of_dtype(str(compute_dtype).removeprefix("torch."))
    if compute_dtype == torch.float32 and allows_tf32():
        tflops = peak.tf32 or peak.fp32
    return math.nan if tflops is None else tflops * _TERA


def allows_tf32() -> bool:
    """Whether this process lets fp32 products on GPUs use TF32, set in any of torch's ways or by a container image."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def total_memory(device: torch.device) -> int:
    """Total memory of a GPU, or of this machine, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def available_memory(device: torch.device) -> int:
    """Memory in bytes that can be allocated on a GPU, or on this machine without swapping; the total if that is unknown."""
    if device.type == "cuda":
        # Memory that torch has reserved but does not use is also available.
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + reserved
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return total_memory(device)


idle_in_graphs: "weakref.WeakKeyDictionary[object, int]" = weakref.WeakKeyDictionary()
"""Bytes that CUDA graphs keep for their replays alone, by graph. torch does not count them as allocated."""


def memory_bytes(device: torch.device) -> int:
    """This process's memory in bytes: the peak that torch needs on a GPU, the resident set size on a CPU.

    Without /proc, which reports the current resident set size, returns the peak so far.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) + sum(idle_in_graphs.values())
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return largest if sys.platform == "darwin" else largest * 1024  # other kernels report KiB; macOS reports bytes


def mfu(tokens_per_second: float, flops_per_token: float, devices: int, peak: float) -> float:
    """Model FLOPs utilization, a fraction: MFU = tokens/s x FLOPs/token / (devices x peak FLOP/s of one device).

    `tokens_per_second` is the total across all devices. `flops_per_token` is boost.config.architecture.flops_per_token:
    one forward and backward pass without recomputation. nan if the peak is unknown.
    """
    return tokens_per_second * flops_per_token / (devices * peak)


# Time.

Moment = float | torch.cuda.Event
"""A timestamp: seconds on the host's clock, or a GPU event."""


def now(device: torch.device) -> Moment:
    """A timestamp. On a GPU, an event that completes after all work launched so far."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(first: Moment, second: Moment) -> float:
    """Seconds between two timestamps from the same device. Waits for the second one."""
    if isinstance(first, float) or isinstance(second, float):
        assert isinstance(first, float) and isinstance(second, float), "both timestamps must be from the same device"
        return second - first
    second.synchronize()
    return first.elapsed_time(second) / 1e3


class StepClock:
    """Duration of each step in seconds: from the end of the previous step to its own end, excluding hooks in between.

    On a GPU, this is GPU time, so hooks that run while the GPU computes do not add to it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin: Moment | None = None
        self._paused: Moment | None = None
        self._gap: tuple[Moment, Moment] | None = None

    def pause(self) -> None:
        """Call before hooks run."""
        self._paused = now(self._device)

    def resume(self) -> None:
        """Call when a step starts, or continues after hooks. No effect if the clock is already running."""
        if self._begin is None:
            self._begin = now(self._device)
        elif self._paused is not None:
            self._gap, self._paused = (self._paused, now(self._device)), None

    def seconds(self, end: Moment) -> float:
        """Duration, in seconds, of the step that ends at `end`. Waits for the end."""
        assert self._begin is not None, "call resume before the first step"
        gap = seconds_between(*self._gap) if self._gap is not None else 0.0
        duration = seconds_between(self._begin, end) - gap
        self._begin, self._gap = end, None
        return duration
