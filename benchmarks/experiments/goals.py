"""The project's speed and memory goals, in order, and how results decide whether they are met."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.experiments.results import Goal
from boost.config.text import read_toml
from boost.errors import MeasurementError

Status = Literal["met", "not met", "not measured"]


@dataclass(frozen=True)
class Target:
    """A goal."""

    what: str
    """Name, matched against the `Goal` of an experiment."""
    figure: str
    where: str
    """Devices and dtypes to measure it on."""
    experiment: str
    """The experiment that measures it."""
    gpu: bool = False
    """Whether it needs a GPU."""
    arithmetic: bool = False
    """Whether the goal is about the performance model itself; then a prediction decides it."""


TARGETS = tuple(Target(**goal) for goal in read_toml(Path(__file__).with_suffix(".toml"))["goal"])
"""All goals, in report order."""


def target_of(what: str) -> Target:
    """Finds the target of an experiment's goal: one name must be a prefix of the other.

    Ignores case, punctuation and spaces. Raises MeasurementError unless exactly one target matches.
    """
    named = _plain(what)
    exact = [target for target in TARGETS if _plain(target.what) == named]
    close = [target for target in TARGETS if _begins(named, _plain(target.what)) or _begins(_plain(target.what), named)]
    found = exact or close
    if len(found) != 1:
        which = "is none of the project's goals" if not found else "could be " + " or ".join(t.what for t in found)
        raise MeasurementError(f"goal '{what}' {which}; the names are in benchmarks/experiments/goals.toml")
    return found[0]


def counts(target: Target, goal: Goal) -> bool:
    """Whether a result decides a target: it has a verdict, and is not a prediction where a measurement is required."""
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


def _plain(text: str) -> str:
    return " ".join(re.findall(r"[a-z0-9./]+", text.lower()))


def _begins(shorter: str, longer: str) -> bool:
    """Whether `longer` starts with all words of `shorter`."""
    return bool(shorter) and longer.split()[: len(shorter.split())] == shorter.split()
