"""Chapters, and the goals of committed results. `python -m benchmarks report --check` shows every one of them."""

from pathlib import Path

import pytest

from benchmarks.commands import EXPERIMENTS
from benchmarks.experiments import results, sections
from boost.errors import ConfigError

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def test_every_experiment_is_in_one_chapter() -> None:
    names = [name for of_chapter in sections.CHAPTERS.values() for name in of_chapter]
    assert len(names) == len(set(names)) and not set(names) & sections.SETTLED.keys()
    assert set(names) | {"evaluation", "report", "timeline"} == EXPERIMENTS.keys()
    assert sections.place("wire") < sections.place("ladder")
    with pytest.raises(ConfigError, match="'odd' is unknown"):
        sections.place("odd")
    for name in sections.SETTLED:
        assert (RESULTS / f"{name}.md").is_file() and results.read(RESULTS / f"{name}.json", name)


def facts_of(name: str) -> results.Facts:
    return results.read(RESULTS / f"{name}.json", name)


def rows_with(rows: list[results.Facts], ratios: dict[int, list[float]]) -> list[results.Facts]:
    """Rows of btp with seconds such that `low-rank` saves these multiples of what `full-block` saves per added time, round by
    round; full-block adds a second to each."""
    made = []
    for batch, wanted in ratios.items():
        ours = {row["policy"]: row for row in rows if (row["layout"], row["batch"]) == ("btp, online", batch)}
        kept = {policy: row["kept_bytes"] for policy, row in ours.items()}
        share = (kept["none"] - kept["low-rank"]) / (kept["none"] - kept["full-block"])
        seconds = {"none": [1.0], "full-block": [2.0], "low-rank": [1 + share / ratio * (1 - 1e-9) for ratio in wanted]}
        made += [{**ours[policy], "seconds": (each * 9)[:9]} for policy, each in seconds.items()]
    return made


def test_goals_say_what_was_found_and_whether_it_is_enough() -> None:
    facts = facts_of("recompute")
    for ratios, met, remark in (
        ({4: [1.7], 8: [1.7]}, True, False),
        ({4: [1.3, 1.7, 2.1], 8: [1.7]}, False, False),  # the interval reaches below 1.4
        ({4: [1.69], 8: [1.7]}, False, True),
    ):
        (goal,) = sections.goals({**facts, "rows": rows_with(facts["rows"], ratios)})
        assert goal.met is met and ("Below the goal at batch 4" in goal.remark) is remark


def test_goals_of_the_performance_model_without_a_measurement() -> None:
    goals = sections.goals(facts_of("validation") | {"machine": None})
    assert [goal.what for goal in goals] == [f"performance model: {what}" for what in ("time", "bytes", "memory")]
    assert all(goal.met is None for goal in goals)
