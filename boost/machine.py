"""What the operating system says about this machine's CPU."""

import contextlib
import os
import platform
from pathlib import Path


def available_cores() -> int:
    """Cores that this process may use. Containers and batch systems often allow fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_model() -> str:
    """Name of the CPU, or its architecture if the system does not report a name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
