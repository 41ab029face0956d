"""Results of several launches become one, and only if they are of the same thing."""

import copy
from typing import Any

import pytest

from benchmarks.experiments.contest import ratio
from benchmarks.experiments.launches import merged
from benchmarks.experiments.results import facts_of
from boost.errors import MeasurementError
from tests import toy

ROWS = [
    {"name": "btp", "seconds": [1.0, 2.0], "sent_bytes": 4},
    {"name": "vanilla", "seconds": [3.0, 4.0], "sent_bytes": 8},
]


def result(shift: float) -> dict[str, Any]:
    turns = {"seconds": {"a": [shift, 2 * shift], "b": [1.0, 2.0]}, "repeats": {"a": 1, "b": 1}}
    facts = facts_of("steps", toy.toy_config(), rounds=2, turns=turns, groups=[{"rows": copy.deepcopy(ROWS)}])
    facts["groups"][0]["rows"][0]["seconds"] = [shift, shift]
    return facts


def test_seconds_become_launches_and_nothing_else_changes() -> None:
    one, two = result(1.0), result(3.0)
    two["environment"]["started"] = "later"
    found = merged([one, two])
    assert found["launches"] == 2 and found["rounds"] == 2
    assert found["turns"]["seconds"] == {"a": [[1.0, 2.0], [3.0, 6.0]], "b": [[1.0, 2.0], [1.0, 2.0]]}
    rows = found["groups"][0]["rows"]
    assert rows[0] == {"name": "btp", "seconds": [[1.0, 1.0], [3.0, 3.0]], "sent_bytes": 4}
    assert found["environment"] == one["environment"] and found["config"] == one["config"]
    assert ratio(found["turns"]["seconds"]["a"], found["turns"]["seconds"]["b"]).value == 2
    assert one["turns"]["seconds"]["a"] == [1.0, 2.0]


def test_launches_of_other_things_are_refused() -> None:
    for change, said in (
        (lambda facts: facts["turns"]["seconds"].pop("a"), "names below"),
        (lambda facts: facts["groups"][0]["rows"].pop(), "length of rows"),
        (lambda facts: facts["config"].update(model={}), "differ in config"),
        (lambda facts: facts.update(rounds=3), "differ in rounds: 2 and 3"),
        (lambda facts: facts["environment"].update(git=None), "differ in commit"),
        (lambda facts: facts["environment"].update(cpu="another"), "different machines"),
    ):
        other = result(1.0)
        change(other)
        with pytest.raises(MeasurementError, match=said):
            merged([result(1.0), other])
