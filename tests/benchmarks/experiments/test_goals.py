"""Goals: their names, what decides them, and the rows of the report's table."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.experiments.goals import NO_DIFFERENCE, TARGETS, goal_rows, status, target_of, verdict
from benchmarks.experiments.results import Goal, MeasurementError, Ratio

FOUND = Goal("btp-sp against btp, bytes", "0.50x", "here", "0.50x", True, "counted")


def test_every_target_is_found_by_its_name() -> None:
    for target in TARGETS:
        assert target_of(target.what) is target
    with pytest.raises(MeasurementError, match="'btp-sp against btp' is none of the project's goals"):
        target_of("btp-sp against btp")


def test_only_measurements_decide_and_all_of_them() -> None:
    target = target_of(FOUND.what)
    assert status(target, [FOUND]) == "met"
    assert status(target, [FOUND, replace(FOUND, met=False)]) == "not met"
    assert status(target, [replace(FOUND, met=None)]) == status(target, []) == "not measured"
    assert status(target, [replace(FOUND, kind="modeled")]) == "not measured"
    assert status(target, [FOUND, replace(FOUND, kind="modeled", met=False)]) == "met"
    assert status(target_of("performance model: published ratios"), [replace(FOUND, kind="modeled")]) == "met"


NAME = "btp-sp against btp, time"


def goal(low: float, high: float, met: bool | None, least: float = 1.0) -> Goal:
    return Goal(NAME, "", "here", "", met, ratio=Ratio((low + high) / 2, low, high), least=least)


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ((0.96, 1.16, False), NO_DIFFERENCE),
        ((0.86, 0.96, False), "not met"),
        ((0.98, 1.04, False, 1.5), "not met"),
        ((1.02, 1.16, True), "met"),
        ((0.98, 1.04, None), "not measured"),
    ],
)
def test_an_interval_that_holds_one_is_no_difference(numbers: tuple[Any, ...], expected: str) -> None:
    assert verdict(goal(*numbers)) == expected


def row(*goals: Goal) -> dict[str, Any]:
    facts = {"experiment": "steps", "environment": {"gpus": [], "cpu": "Slow CPU", "cores": 2}}
    return next(each for each in goal_rows([(facts, goals)]) if each["target"].what == NAME)


def test_one_result_that_is_worse_decides() -> None:
    even, worse = goal(0.96, 1.16, False), goal(0.86, 0.96, False)
    assert row(even)["status"] == NO_DIFFERENCE and row(even, worse)["status"] == "not met"
    assert row()["status"] == "not measured" and row()["found"] == []
    assert row(even)["found"][0]["machine"] == "Slow CPU, 2 cores"
