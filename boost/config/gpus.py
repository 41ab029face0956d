"""Peak TFLOP/s of GPUs by name (`gpus.toml`)."""

import functools
import re
import tomllib
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True)
class PeakFlops:
    """Dense peak TFLOP/s of one GPU. `gpus.toml` documents the columns."""

    name: str
    bf16: float
    fp32: float
    tf32: float | None = None
    fp64: float | None = None

    def of_dtype(self, dtype: str) -> float | None:
        """Peak TFLOP/s of GEMMs in `dtype`, such as 'float32' (without TF32); None if unknown."""
        return {"float32": self.fp32, "float64": self.fp64}.get(dtype, self.bf16)


@functools.cache
def gpu_peaks() -> tuple[PeakFlops, ...]:
    """All known GPUs. Longer names come before their prefixes."""
    text = (resources.files("boost.config") / "gpus.toml").read_text(encoding="utf-8")
    return tuple(PeakFlops(**row) for row in tomllib.loads(text)["gpu"])


def find_peak(device_name: str) -> PeakFlops | None:
    """The GPU called `device_name`; None if it is unknown, a laptop variant, or a MIG slice."""
    if has_words(device_name, "Laptop") or has_words(device_name, "MIG"):
        return None
    return next((peak for peak in gpu_peaks() if has_words(device_name, peak.name)), None)


def has_words(name: str, words: str) -> bool:
    """Whether `name` contains `words` as whole words: 'A40' does not match 'RTX A4000'."""
    return re.search(rf"(?<![a-z0-9]){re.escape(words)}(?![a-z0-9])", name, re.IGNORECASE) is not None
