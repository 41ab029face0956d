"""The project's goals: every finding is matched to its target, and only measurements decide."""

from dataclasses import replace

import pytest

from benchmarks.experiments.goals import TARGETS, missing, status, target_of
from benchmarks.experiments.results import Goal
from boost.errors import MeasurementError

FOUND = Goal("btp-sp against btp, bytes", "0.50x", "here", "0.50x", True, "counted")


def test_every_target_is_found_by_its_name() -> None:
    assert len({target.what for target in TARGETS}) == len(TARGETS) == 26
    for target in TARGETS:
        assert target_of(target.what) is target


@pytest.mark.parametrize(
    ("said", "what"),
    [
        ("`btp-sp` against `btp`, time", "btp-sp against btp, time"),
        ("latents kept without recomputation (7B)", "latents kept without recomputation"),
        ("performance model:  Memory", "performance model: memory"),
    ],
)
def test_small_differences_of_wording_do_not_matter(said: str, what: str) -> None:
    assert target_of(said).what == what


@pytest.mark.parametrize(
    ("said", "answer"),
    [("speed", "none of the project's goals"), ("btp-sp against btp", "could be .*time or .*bytes"), ("", "none")],
)
def test_a_goal_that_is_none_or_two_is_refused(said: str, answer: str) -> None:
    with pytest.raises(MeasurementError, match=answer):
        target_of(said)


def test_only_measurements_decide_and_all_of_them() -> None:
    target = target_of(FOUND.what)
    assert status(target, [FOUND]) == "met"
    assert status(target, [FOUND, replace(FOUND, met=False)]) == "not met"
    assert status(target, [replace(FOUND, met=None)]) == status(target, []) == "not measured"
    assert status(target, [replace(FOUND, kind="modeled")]) == "not measured"
    assert status(target, [FOUND, replace(FOUND, kind="modeled", met=False)]) == "met"
    assert status(target_of("performance model: published ratios"), [replace(FOUND, kind="modeled")]) == "met"


def test_what_was_not_measured_says_why() -> None:
    assert "python -m benchmarks single" in missing(target_of("low-rank MFU, 1B, bf16, one GPU"))
    assert "GPU" in missing(target_of("low-rank MFU, 1B, bf16, one GPU"))
    assert "GPU" not in missing(target_of("latents kept without recomputation"))
