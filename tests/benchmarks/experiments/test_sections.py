"""Chapters, and the goals of committed results. `python -m benchmarks report --check` shows every one of them."""

from pathlib import Path

import pytest

from benchmarks.commands import EXPERIMENTS
from benchmarks.experiments import recompute, results, sections
from boost.errors import ConfigError

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def test_every_experiment_is_in_one_chapter() -> None:
    names = [name for of_chapter in sections.CHAPTERS.values() for name in of_chapter]
    assert len(names) == len(set(names)) and not set(names) & sections.SETTLED.keys()
    assert set(names) | {"official", "evaluation", "report", "timeline"} == EXPERIMENTS.keys()
    assert sections.place("wire") < sections.place("ladder")
    with pytest.raises(ConfigError, match="'odd' is unknown"):
        sections.place("odd")
    for name in sections.SETTLED:
        assert (RESULTS / f"{name}.md").is_file() and results.read(RESULTS / f"{name}.json", name)


def facts_of(name: str) -> results.Facts:
    return results.read(RESULTS / f"{name}.json", name)


BTP_LOW_RANK = ("btp, online", "low-rank")


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
    (checkpointing,) = sections.goals(facts)
    found = [each for each in recompute.added_times(facts["rows"]) if (each.layout, each.policy) == BTP_LOW_RANK]
    assert len(found) == 2
    for each in found:
        assert f"batch {each.batch}: {each.against_full_block:.2f}" in checkpointing.found
    assert checkpointing.met is False
    for ratios, met, remark in (
        ({4: [1.7], 8: [1.7]}, True, False),
        ({4: [1.3, 1.7, 2.1], 8: [1.7]}, False, False),  # the interval reaches below 1.4
        ({4: [1.69], 8: [1.7]}, False, True),
    ):
        (goal,) = sections.goals({**facts, "rows": rows_with(facts["rows"], ratios)})
        assert goal.met is met and ("Below the goal at batch 4" in goal.remark) is remark
    assert sections.goals(facts_of("curves")) == []


def test_goals_of_the_performance_model_name_what_is_beyond_them() -> None:
    facts = facts_of("validation")
    rows = facts["machine"]["rows"]
    rows[:] = [row | {"measured_s": row["predicted_s"]} for row in rows]
    goals = {goal.what: goal for goal in sections.goals(facts)}
    assert list(goals) == [f"performance model: {what}" for what in ("time", "bytes", "memory")]
    assert all(goal.met for goal in goals.values())
    rows[2]["measured_s"] = rows[2]["predicted_s"] / 1.2
    rows[3]["counted_sent"] = 2 * rows[3]["predicted_sent"] + 1
    goals = {goal.what: goal for goal in sections.goals(facts)}
    time, sent = goals["performance model: time"], goals["performance model: bytes"]
    assert not time.met and "18 of 19" in time.found and "+20.0%" in time.found and rows[2]["name"] in time.remark
    assert not sent.met and rows[3]["name"] in sent.remark
    assert goals["performance model: memory"].met
    unmeasured = {goal.what: goal for goal in sections.goals(facts | {"machine": None})}
    assert unmeasured["performance model: time"].met is None
