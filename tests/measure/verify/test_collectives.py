"""Collectives against plain arithmetic, and their speeds against a profile."""

import pytest
import torch

from boost.config.traffic import ALL_REDUCE
from boost.measure.speed import Point
from boost.measure.verify import collectives as checks
from boost.measure.verify.collectives import COMMS, DTYPES, _judged, expected, wrong_functions
from boost.measure.verify.report import Report, Verifier
from boost.parallel import collectives
from boost.plan.hardware import Link
from tests import toy
from tests.distributed import run_distributed


def wrong(dtype: torch.dtype, size: int) -> list[str]:
    return wrong_functions(toy.mesh(size).tp, dtype, toy.CPU)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_function_is_right(dtype: torch.dtype, size: int) -> None:
    assert run_distributed(size, wrong, dtype, size) == [[]] * size


def wrong_where_sums_are_doubled() -> list[str]:
    usual = collectives.start_plain
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            collectives, "start_plain", lambda kind, x, axis: usual(kind, (1 + (kind == ALL_REDUCE)) * x, axis)
        )
        return sorted(set(wrong(torch.float32, 2)))


def test_a_wrong_sum_is_found_in_every_function_that_has_one() -> None:
    with_sums = [name for name, comm in COMMS.items() if ALL_REDUCE in (comm.forward, comm.backward)]
    due = sorted([ALL_REDUCE, *(name + way for name in with_sums for way in ("", ", started"))])
    assert run_distributed(2, wrong_where_sums_are_doubled) == [due] * 2


def wrong_where_one_process_errs() -> list[str]:
    usual = checks.PLAIN[ALL_REDUCE]
    with pytest.MonkeyPatch.context() as patch:
        mesh = toy.mesh(2)
        if mesh.rank == 1:
            patch.setitem(checks.PLAIN, ALL_REDUCE, lambda x, axis: usual(x, axis) + 1)
        verifier = Verifier(mesh, Report(say=lambda line: None))
        checks.verify(verifier, {"all": mesh.tp}, toy.CPU)
    return [check.verdict for check in verifier.report.checks]


def test_one_process_that_gets_something_else_fails_the_check() -> None:
    assert run_distributed(2, wrong_where_one_process_errs) == [["failed"] * len(DTYPES)] * 2


def test_plain_arithmetic() -> None:
    """By hand: two processes with [1, 2] and [3, 4]."""
    payloads = [torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]])]

    def of(kind: str | None, rank: int) -> list[float]:
        return expected(kind, payloads, rank).flatten().tolist()

    assert of(None, 1) == [3, 4]
    assert of("all-reduce", 0) == of("all-reduce", 1) == [4, 6]
    assert of("all-gather", 0) == [1, 2, 3, 4]
    assert (of("reduce-scatter", 0), of("reduce-scatter", 1)) == ([4], [6])
    assert (of("all-to-all", 0), of("all-to-all", 1)) == ([1, 3], [2, 4])


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
