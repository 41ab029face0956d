"""Sanity checks of a calibrated profile: a noisy profile gives useless plans."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

FIT_ERROR, WORST_FIT_ERROR = 0.2, 0.5
"""Mean error of the GEMM fit: thresholds for a warning and for refusing the profile."""

DRIFT, WORST_DRIFT = 1.5, 4.0
"""Slowdown of the probe during calibration: thresholds for a warning and for refusing the profile."""

LEAST_GB_S = 0.01
"""Minimum plausible bandwidth of memory and links in GB/s. A slower measurement measured waiting."""

LEAST_TFLOPS = 1e-4
"""Minimum plausible speed of large GEMMs in TFLOP/s."""


@dataclass(frozen=True)
class Problem:
    """A problem of a calibrated profile."""

    words: str
    serious: bool
    """Whether it makes the profile useless."""


def problems(profile: dict[str, Any], fit_errors: Sequence[tuple[str, float]], drift: float) -> Iterator[Problem]:
    """Yields the problems of a profile in its file format.

    `fit_errors`: mean error of the GEMM fit, by '<sweep>, <dtype>'. `drift`: seconds of the probe after the calibration, relative
    to before.
    """
    for name, number in _numbers(profile):
        if not math.isfinite(number) or number < 0:
            yield Problem(f"{name} = {number:g} is not a valid speed", True)
    for sweep in [profile["speeds"], *([profile["alone"]] if "alone" in profile else [])]:
        for dtype, speed in sweep["gemm"].items():
            if (reached := speed["tflops"] * speed["fraction"]) < LEAST_TFLOPS:
                yield Problem(f"{dtype} GEMMs reach {reached * 1e3:.3g} GFLOP/s", True)
        if sweep["memory_gb_s"] < LEAST_GB_S:
            yield Problem(f"memory bandwidth is {sweep['memory_gb_s']:.3g} GB/s", True)
    link = profile["node"]
    if link.get("known", True) and link["gb_s"] < LEAST_GB_S:
        yield Problem(f"{link['name']} sends {link['gb_s']:.2g} GB/s between processes", True)
    for name, error in fit_errors:
        if not error < FIT_ERROR:
            yield Problem(f"the GEMM fit has a mean error of {error:.0%} ({name})", not error < WORST_FIT_ERROR)
    if not drift < DRIFT:
        yield Problem(f"the machine became {drift:.1f} times slower during calibration", not drift < WORST_DRIFT)


def _numbers(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in tree.items():
        listed = value if isinstance(value, list) else [value]
        for each in listed:
            if isinstance(each, dict):
                yield from _numbers(each, f"{prefix}{key}.")
            elif isinstance(each, list):
                yield from ((f"{prefix}{key}", float(number)) for number in each if isinstance(number, int | float))
            elif isinstance(each, int | float) and not isinstance(each, bool):
                yield f"{prefix}{key}", float(each)
