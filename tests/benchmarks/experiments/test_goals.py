"""Goals: their names, what decides them, and the rows of the report's table."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.experiments.goals import NO_DIFFERENCE, TARGETS, goal_rows, status, target_of, verdict
from benchmarks.experiments.results import Goal, MeasurementError

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


def goal(found: str, met: bool | None, figure: str = "never slower", what: str = NAME) -> Goal:
    return Goal(what, figure, "here", found, met)


@pytest.mark.parametrize(
    ("found", "met", "figure", "expected"),
    [
        ("1.02 (0.96 to 1.16) x", False, "never slower", NO_DIFFERENCE),
        ("1.02 (0.96 to 1.16) x", False, ">= 1.0x", NO_DIFFERENCE),
        ("0.90 (0.86 to 0.96) x", False, "never slower", "not met"),
        ("1.02 (0.98 to 1.04) x", False, ">= 1.5x", "not met"),
        ("1.10 (1.02 to 1.16) x", True, "never slower", "met"),
        ("1.02 (0.98 to 1.04), 1.20 (1.10 to 1.30)", False, ">= 1.0x", "not met"),
        ("", None, "never slower", "not measured"),
    ],
)
def test_an_interval_that_holds_one_is_no_difference(found: str, met: bool | None, figure: str, expected: str) -> None:
    assert verdict(goal(found, met, figure)) == expected


def row(*goals: Goal) -> dict[str, Any]:
    facts = {"experiment": "steps", "environment": {"gpus": [], "cpu": "Slow CPU", "cores": 2}}
    return next(each for each in goal_rows([(facts, goals)]) if each["target"].what == NAME)


def test_one_result_that_is_worse_decides() -> None:
    even, worse = goal("1.02 (0.96 to 1.16) x", False), goal("0.90 (0.86 to 0.96) x", False)
    assert row(even)["status"] == NO_DIFFERENCE and row(even, worse)["status"] == "not met"
    assert row()["status"] == "not measured" and row()["found"] == []
    assert row(even)["found"][0]["machine"] == "Slow CPU, 2 cores"
