"""Verdicts of results and of goals."""

from typing import Any

import pytest

from benchmarks.experiments.goal_table import NO_DIFFERENCE, goal_rows, shows_no_difference, verdict
from benchmarks.experiments.results import Goal

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
        ("", None, "never slower", "not measured"),
    ],
)
def test_an_interval_that_holds_one_is_no_difference(found: str, met: bool | None, figure: str, expected: str) -> None:
    assert verdict(goal(found, met, figure)) == expected


def test_every_interval_must_hold_one() -> None:
    assert shows_no_difference(goal("1.02 (0.98 to 1.04) x", False, ">= 1.5x"))
    assert not shows_no_difference(goal("1.02 (0.98 to 1.04), 1.20 (1.10 to 1.30)", False, ">= 1.5x"))
    assert not shows_no_difference(goal("0.95 (0.90 to 1.02)", False, ">= 0.93 of ideal", "TP=2 against the ideal"))


def row(*goals: Goal) -> dict[str, Any]:
    facts = {"experiment": "steps", "environment": {"gpus": [], "cpu": "Slow CPU", "cores": 2}}
    return next(each for each in goal_rows([(facts, goals)]) if each["target"].what == NAME)


def test_one_result_that_is_worse_decides() -> None:
    even, worse = goal("1.02 (0.96 to 1.16) x", False), goal("0.90 (0.86 to 0.96) x", False)
    assert row(even)["status"] == NO_DIFFERENCE and row(even, worse)["status"] == "not met"
    assert row()["status"] == "not measured" and row()["found"] == []
    assert row(even)["found"][0]["machine"] == "Slow CPU, 2 cores"
