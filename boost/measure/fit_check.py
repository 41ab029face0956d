"""Whether what a calibration measured can be a machine: a profile of noise plans nonsense."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

FIT_ERROR, WORST_FIT_ERROR = 0.2, 0.5
"""Mean error of the law fitted to GEMMs: from which on it is marked, and refused."""

DRIFT, WORST_DRIFT = 1.5, 4.0
"""How many times slower the probe was after the calibration than before: marked, refused."""

LEAST_GB_S = 0.01
"""Of memory and links. Slower ones were waiting, not sending."""

LEAST_TFLOPS = 1e-4
"""Of large GEMMs."""


@dataclass(frozen=True)
class Problem:
    """Something that is wrong with a fit."""

    words: str
    serious: bool
    """Whether the profile is useless."""


def problems(profile: dict[str, Any], fit_errors: Sequence[tuple[str, float]], drift: float) -> Iterator[Problem]:
    """Of a profile as its file has it. `fit_errors`: mean error of the GEMM law, by '<sweep> <dtype>'; `drift`: seconds of the
    probe after the calibration over those before."""
    for name, number in _numbers(profile):
        if not math.isfinite(number) or number < 0:
            yield Problem(f"{name} = {number:g} is not a speed", True)
    for sweep in [profile["speeds"], *([profile["alone"]] if "alone" in profile else [])]:
        for dtype, speed in sweep["gemm"].items():
            if (reached := speed["tflops"] * speed["fraction"]) < LEAST_TFLOPS:
                yield Problem(f"{dtype} GEMMs reach {reached * 1e3:.3g} GFLOP/s", True)
        if sweep["memory_gb_s"] < LEAST_GB_S:
            yield Problem(f"memory moves {sweep['memory_gb_s']:.3g} GB/s", True)
    link = profile["node"]
    if link.get("known", True) and link["gb_s"] < LEAST_GB_S:
        yield Problem(f"{link['name']} sends {link['gb_s']:.2g} GB/s between processes", True)
    for name, error in fit_errors:
        if not error < FIT_ERROR:
            yield Problem(f"the law of GEMMs misses its points by {error:.0%} ({name})", not error < WORST_FIT_ERROR)
    if not drift < DRIFT:
        yield Problem(f"the machine became {drift:.1f} times slower while it was measured", not drift < WORST_DRIFT)


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
