"""Hardware limits and utilization: peak FLOP/s, memory in use, model FLOPs utilization."""

import math
import os
import re
import resource
import sys
import time
from dataclasses import dataclass

import torch

_TERA = 1e12


@dataclass(frozen=True)
class PeakFlops:
    """Peak dense TFLOP/s of one GPU (datasheets often state twice that, "with sparsity")."""

    name: str
    """Words to look for in the name returned by torch.cuda.get_device_name."""
    bf16: float
    """Tensor cores, bfloat16 products with fp32 accumulation (fp16 if the GPU has no bfloat16)."""
    fp32: float
    """fp32 without tensor cores."""
    tf32: float | None = None
    """Tensor cores in TF32, used for fp32 products if torch.set_float32_matmul_precision allows it."""
    fp64: float | None = None
    """fp64, with tensor cores if they support it."""


# The first match wins, so longer names come before their prefixes.
GPU_PEAKS: tuple[PeakFlops, ...] = (
    # NVIDIA Blackwell datasheets (HGX B200; GB200 NVL72 per GPU).
    PeakFlops("GB200", 2500, 80, 1250, 40),
    PeakFlops("B200", 2250, 75, 1125, 37),
    # NVIDIA H100, H100 NVL, H200 and GH200 datasheets; the names of SXM boards contain neither "PCIe" nor "NVL".
    PeakFlops("GH200", 989, 67, 494, 67),
    PeakFlops("H200 NVL", 835, 60, 417, 60),
    PeakFlops("H200", 989, 67, 494, 67),
    PeakFlops("H100 NVL", 835, 60, 417, 60),
    PeakFlops("H100 PCIe", 756, 51, 378, 51),
    PeakFlops("H100", 989, 67, 494, 67),
    PeakFlops("H800", 989, 67, 494, 1),
    PeakFlops("H20", 148, 44, 74, 1),
    # NVIDIA A100 datasheet; the A800 differs only in NVLink.
    PeakFlops("A100", 312, 19.5, 156, 19.5),
    PeakFlops("A800", 312, 19.5, 156, 19.5),
    # NVIDIA A30, A40, A10, A10G (AWS G5), RTX A6000 datasheets.
    PeakFlops("A30", 165, 10.3, 82, 10.3),
    PeakFlops("A40", 149.7, 37.4, 74.8),
    PeakFlops("A10G", 70, 35, 35),
    PeakFlops("A10", 125, 31.2, 62.5),
    PeakFlops("RTX A6000", 154.8, 38.7, 77.4),
    # NVIDIA Ada datasheets and whitepaper (fp32 accumulation).
    PeakFlops("L40S", 362, 91.6, 183),
    PeakFlops("L40", 181, 90.5, 90.5),
    PeakFlops("L4", 121, 30.3, 60),
    PeakFlops("RTX 4090 D", 147, 73.5, 73.5),
    PeakFlops("RTX 4090", 165.2, 82.6, 82.6),
    PeakFlops("RTX 3090", 71, 35.6, 35.6),
    # NVIDIA V100 and T4 datasheets: fp16 tensor cores only.
    PeakFlops("V100", 125, 15.7, None, 7.8),
    PeakFlops("T4", 65, 8.1),
    # AMD MI300X datasheet (matrix cores; fp32 vector).
    PeakFlops("MI300X", 1307.4, 163.4, 653.7, 163.4),
)

_GEMM_SIZE = 1024
_GEMM_SECONDS = 0.2
_GEMM_MIN_RUNS = 3


def peak_flops(device: torch.device, compute_dtype: torch.dtype, override_tflops: float = 0.0) -> float:
    """Peak FLOP/s of one device in `compute_dtype`: `override_tflops` if not 0; from the table for a GPU; measured on a CPU.

    The CPU measurement is the best of several GEMMs with this process's threads and takes about 0.2 s. It is what is achievable
    now, not a datasheet number. nan for a GPU that is not in the table: set run.peak_tflops.
    """
    if override_tflops > 0:
        return override_tflops * _TERA
    if device.type == "cuda":
        return gpu_peak_flops(torch.cuda.get_device_name(device), compute_dtype)
    return measured_flops(device, compute_dtype)


def gpu_peak_flops(name: str, compute_dtype: torch.dtype) -> float:
    """Peak FLOP/s of the GPU called `name`; nan for a laptop variant, a MIG slice, or a GPU that is not in the table."""
    found = next((peak for peak in GPU_PEAKS if _has_words(name, peak.name)), None)
    if found is None or _has_words(name, "Laptop") or _has_words(name, "MIG"):
        return math.nan
    if compute_dtype == torch.float32:
        tensor_cores = torch.get_float32_matmul_precision() != "highest"
        tflops: float | None = (found.tf32 or found.fp32) if tensor_cores else found.fp32
    elif compute_dtype == torch.float64:
        tflops = found.fp64
    else:
        tflops = found.bf16
    return math.nan if tflops is None else tflops * _TERA


def _has_words(name: str, words: str) -> bool:
    """Whether `name` contains `words` as whole words: the A40 is not the RTX A4000."""
    return re.search(rf"(?<![a-z0-9]){re.escape(words)}(?![a-z0-9])", name, re.IGNORECASE) is not None


def measured_flops(device: torch.device, compute_dtype: torch.dtype) -> float:
    """FLOP/s of the fastest of several square GEMMs on `device`, a CPU. The first one is a warm-up and does not count."""
    a = torch.randn(_GEMM_SIZE, _GEMM_SIZE, generator=torch.Generator().manual_seed(0)).to(device, compute_dtype)
    out = torch.empty_like(a)
    torch.mm(a, a, out=out)
    best, done = math.inf, 0
    deadline = time.perf_counter() + _GEMM_SECONDS
    while done < _GEMM_MIN_RUNS or time.perf_counter() < deadline:
        begun = time.perf_counter()
        torch.mm(a, a, out=out)
        best = min(best, time.perf_counter() - begun)
        done += 1
    return 2 * _GEMM_SIZE**3 / best


def total_memory(device: torch.device) -> int:
    """Total memory of a GPU, or of this machine, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def memory_bytes(device: torch.device) -> int:
    """Memory of this process in bytes: the peak allocated by torch on a GPU, the resident set size on a CPU.

    Without /proc, which reports the current resident set size, it is the peak so far.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return peak_resident_bytes()


def peak_resident_bytes() -> int:
    """Peak resident set size of this process so far, in bytes (the kernel reports KiB, macOS bytes)."""
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024


def mfu(tokens_per_second: float, flops_per_token: float, devices: int, peak: float) -> float:
    """Model FLOPs utilization, a fraction: MFU = tokens/s x FLOPs/token / (devices x peak FLOP/s of one device).

    `tokens_per_second` is the total of all devices. `flops_per_token` is boost.config.architecture.flops_per_token: forward and
    backward pass without recomputation. nan if the peak is unknown.
    """
    return tokens_per_second * flops_per_token / (devices * peak)
