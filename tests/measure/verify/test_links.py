"""Speeds of collectives against a profile."""

import pytest

from boost.measure.speed import Point
from boost.measure.verify.links import _judged
from boost.plan.hardware import Link

LINK = Link(name="wire", latency_us=10.0, gb_s=10.0)


def points(factor: float) -> list[Point]:
    """Points of two processes whose link is `factor` times slower than LINK."""
    found = []
    for size in (1 << 14, 1 << 24):
        for kind, sent in (("all-reduce", size), ("all-gather", size // 2)):
            found.append(Point(kind, "float32", (size,), factor * (10e-6 + sent / 10e9)))
    return found


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "ok"), (0.5, "ok"), (3.0, "note")])
def test_a_slow_link_is_noted(factor: float, verdict: str) -> None:
    found = _judged([points(factor)], 2, LINK)
    assert (found.verdict, f"{factor:.2f}x the profile's time" in found.detail) == (verdict, True), found.detail


def test_without_a_profile_there_are_numbers_only() -> None:
    found = _judged([points(1.0)], 2, None)
    assert found.verdict == "ok" and "profile" not in found.detail
    assert "GB/s at 16.8 MB: all-reduce 9.9, all-gather 9.9" in found.detail
    assert len(found.numbers["points"]) == 4
