"""The rows of the report's table of goals, with the verdict of every result and of every goal."""

import re
from collections.abc import Sequence
from typing import Any

from benchmarks.experiments.goals import TARGETS, Target, missing, status, target_of
from benchmarks.experiments.headline import INTERVAL
from benchmarks.experiments.results import Facts, Goal, machine

NO_DIFFERENCE = "no difference shown"
"""Verdict of a comparison with 1 whose interval holds 1."""

VERDICTS = ("met", "not met", NO_DIFFERENCE, "not measured")


def goal_rows(results: Sequence[tuple[Facts, Sequence[Goal]]]) -> list[dict[str, Any]]:
    """One row per target, in order, with all of its results. `results`: (facts, goals)."""
    found: dict[Target, list[tuple[Goal, Facts]]] = {target: [] for target in TARGETS}
    for facts, goals in results:
        for goal in goals:
            found[target_of(goal.what)].append((goal, facts))
    return [
        {
            "target": target,
            "status": _status(target, [goal for goal, _ in of_target]),
            "found": [
                {
                    "goal": goal,
                    "machine": _machine_of(goal, facts),
                    "verdict": verdict(goal),
                    "no_difference": shows_no_difference(goal),
                    "id": facts["experiment"],
                }
                for goal, facts in of_target
            ],
            "missing": missing(target),
        }
        for target, of_target in found.items()
    ]


def shows_no_difference(goal: Goal) -> bool:
    """Whether a result is a comparison of two contenders whose intervals all hold 1."""
    compared = re.search(r"\d ?x?$|\bslower$", goal.figure.strip()) is not None and " against " in goal.what
    intervals = [(float(each["low"]), float(each["high"])) for each in INTERVAL.finditer(goal.found)]
    return compared and bool(intervals) and all(low <= 1 <= high for low, high in intervals)


def verdict(goal: Goal) -> str:
    """The verdict of one result. A goal of at least 1, not met, of which nothing is shown either way, has a verdict of its own."""
    if goal.met is None:
        return "not measured"
    if goal.met:
        return "met"
    of_one = "never slower" in goal.figure or re.search(r">= 1(\.0+)?x?$", goal.figure.strip()) is not None
    return NO_DIFFERENCE if of_one and shows_no_difference(goal) else "not met"


def _status(target: Target, goals: Sequence[Goal]) -> str:
    found = status(target, goals)
    verdicts = {verdict(goal) for goal in goals} - {"met", "not measured"}
    return NO_DIFFERENCE if found == "not met" and verdicts == {NO_DIFFERENCE} else found


def _machine_of(goal: Goal, facts: Facts) -> str:
    """The machine of a goal's result; '' for predictions, or if the goal already names it."""
    name = machine(facts["environment"])
    return "" if goal.kind == "modeled" or name in goal.where else name
