"""What calibration refuses, and what it warns about."""

from typing import Any

import pytest

from boost.measure.calibrate import problems


def profile(**changes: Any) -> dict[str, Any]:
    speeds = {"memory_gb_s": 10.0, "gemm": {"float32": {"tflops": 0.05, "fraction": 0.9, "half": [1.0, 2.0, 3.0]}}}
    return {"speeds": speeds, "node": {"name": "loopback", "gb_s": 1.5, "latency_us": 20.0}, "host_us": 9.0} | changes


def said(changed: dict[str, Any], error: float = 0.05, drift: float = 1.1) -> list[tuple[str, bool]]:
    return [(each.words, each.serious) for each in problems(changed, [("together, float32", error)], drift)]


def test_a_machine_that_was_idle() -> None:
    assert said(profile()) == []


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (profile(node={"name": "loopback", "gb_s": 0.001, "latency_us": 20.0}), "loopback sends 0.001 GB/s"),
        (profile(host_us=float("nan")), "host_us = nan"),
        (profile(host_us=-3.0), "host_us = -3"),
        (profile(speeds=profile()["speeds"] | {"memory_gb_s": 0.0}), "memory bandwidth is 0 GB/s"),
        (
            profile(speeds=profile()["speeds"] | {"gemm": {"float32": {"tflops": 1e-6, "fraction": 0.9}}}),
            "float32 GEMMs reach",
        ),
        (
            profile(speeds=profile()["speeds"] | {"kernels": {"sum float32": [[64.0, float("inf")]]}}),
            "speeds.kernels.sum float32",
        ),
    ],
)
def test_implausible_profiles(changed: dict[str, Any], words: str) -> None:
    (found,) = said(changed)
    assert words in found[0] and found[1]


def test_noise_gives_a_warning_or_is_refused() -> None:
    assert said(profile(), error=0.3) == [("the GEMM fit has a mean error of 30% (together, float32)", False)]
    assert [serious for _, serious in said(profile(), error=0.6)] == [True]
    assert [serious for _, serious in said(profile(), error=float("nan"))] == [True]
    assert [serious for _, serious in said(profile(), drift=2.0)] == [False]
    assert [serious for _, serious in said(profile(), drift=5.0)] == [True]


def test_unmeasured_links_are_no_problem() -> None:
    assert said(profile(node={"name": "loopback", "gb_s": 0.0, "known": False})) == []
