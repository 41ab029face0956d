"""The project's speed and memory goals in order, whether results meet them, and the rows of the report's table of goals."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.experiments.results import Facts, Goal, MeasurementError, machine
from boost.text import read_toml

Status = Literal["met", "not met", "not measured"]


@dataclass(frozen=True)
class Target:
    """A goal."""

    what: str
    """Name, as in the `Goal` of an experiment."""
    figure: str
    where: str
    """Devices and dtypes on which to measure it."""
    experiment: str
    """The experiment that measures it."""
    gpu: bool = False
    """Whether it needs a GPU."""
    arithmetic: bool = False
    """Whether the goal is about the performance model itself, so that a prediction decides it."""


TARGETS = tuple(Target(**goal) for goal in read_toml(Path(__file__).with_suffix(".toml"))["goal"])
"""All goals, in report order."""


def target_of(what: str) -> Target:
    """The target of an experiment's goal. Raises MeasurementError if there is none."""
    for target in TARGETS:
        if target.what == what:
            return target
    raise MeasurementError(
        f"goal '{what}' is none of the project's goals, which are in benchmarks/experiments/goals.toml"
    )


def counts(target: Target, goal: Goal) -> bool:
    """Whether a result decides a target: it has a verdict and is not a prediction if a measurement is required."""
    return goal.met is not None and (target.arithmetic or goal.kind != "modeled")


def status(target: Target, goals: Iterable[Goal]) -> Status:
    """'met' if all measurements meet the target, 'not met' if any does not. Predictions do not count."""
    verdicts = [goal.met for goal in goals if counts(target, goal)]
    if not verdicts:
        return "not measured"
    return "met" if all(verdicts) else "not met"


def missing(target: Target) -> str:
    """Explains why a target has no result."""
    needs = " (needs a CUDA GPU)" if target.gpu else ""
    return f"No result of `python -m benchmarks {target.experiment}`{needs}."


NO_DIFFERENCE = "no difference shown"
"""Verdict if a ratio that should be at least 1 has an interval that contains 1."""

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
            "status": _shown_status(target, [goal for goal, _ in of_target]),
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
    """Whether a result is a ratio whose interval contains 1."""
    return goal.ratio is not None and goal.ratio.low <= 1 <= goal.ratio.high


def verdict(goal: Goal) -> str:
    """The verdict on one result. It is NO_DIFFERENCE if a goal of at least 1 is missed but the interval contains 1."""
    if goal.met is None:
        return "not measured"
    if goal.met:
        return "met"
    return NO_DIFFERENCE if goal.least == 1 and shows_no_difference(goal) else "not met"


def _shown_status(target: Target, goals: Sequence[Goal]) -> str:
    found = status(target, goals)
    verdicts = {verdict(goal) for goal in goals} - {"met", "not measured"}
    return NO_DIFFERENCE if found == "not met" and verdicts == {NO_DIFFERENCE} else found


def _machine_of(goal: Goal, facts: Facts) -> str:
    """The machine of a goal's result, or '' for predictions or if the goal already names the machine."""
    name = machine(facts["environment"])
    return "" if goal.kind == "modeled" or name in goal.where else name
