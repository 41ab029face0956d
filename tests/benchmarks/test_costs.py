"""benchmarks/costs.py: the predicted costs on docs/worth.md."""

import json

import pytest

from benchmarks.costs import MACHINES, RESULT, cost


@pytest.mark.slow
def test_the_result_is_what_the_planner_predicts_now() -> None:
    """`python -m benchmarks.costs`, then `python docs/facts.py`, after a change of the planner or of a profile."""
    stored = json.loads(RESULT.read_text(encoding="utf-8"))["machines"]
    assert set(stored) == set(MACHINES)
    for name, size in (("one H100", "60m"), ("one RTX 4090", "130m")):
        for family in ("cola", "llama"):
            found, before = cost(f"{family}-{size}", *MACHINES[name]), stored[name][size][family]
            assert found["hours"] == pytest.approx(before["hours"], rel=0.01)
            assert found["gb"] == pytest.approx(before["gb"], rel=0.01)
    assert cost("llama-7b", "rtx4090", 1) == {} == stored["one RTX 4090"]["7b"]["llama"]
