"""What the operating system says about this machine's CPU, and the launcher about its processes."""

import contextlib
import os
import platform
from pathlib import Path

from boost.errors import ConfigError


def available_cores() -> int:
    """Cores that this process may use. Containers and batch systems often allow fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def launcher_number(name: str, default: str = "") -> int:
    """A number that the launcher passes as an environment variable, such as RANK. Raises ConfigError."""
    value = os.environ.get(name, default)
    if not value.isdecimal():
        raise ConfigError(
            f"{name} = {value!r} in the environment is not a number; start with torchrun, or unset WORLD_SIZE and RANK"
        )
    return int(value)


def cpu_model() -> str:
    """Name of the CPU, or its architecture if the system does not report a name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
