"""The modeled evaluation: the committed numbers are those of this code."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.experiments import modeled
from benchmarks.experiments.computed import goals, norm_goal
from benchmarks.experiments.results import read

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict | list | tuple):
        for below in tree.values() if isinstance(tree, dict) else tree:
            yield from leaves(below)
    else:
        yield tree


def test_the_committed_result_is_current() -> None:
    """`python -m benchmarks modeled`, then `python docs/facts.py`, after a change of the planner or of a profile."""
    now, committed = modeled.model(), read(RESULTS / "modeled.json", "modeled")
    assert goals(now) == goals(committed)
    for key in ("paper", "published", "accumulation"):
        for ours, theirs in zip(leaves(now[key]), leaves(committed[key]), strict=True):
            assert ours == (pytest.approx(theirs, rel=0.01) if isinstance(theirs, float) else theirs), key


def test_the_norm_has_its_worst_case_in_its_goal() -> None:
    slower = norm_goal({"3B a100-80g": 1 / 1.1, "7B a100-80g": 1.1})
    assert slower.met is False and slower.found == "0.909 x in the worst of 2 cases (3B a100-80g)"
