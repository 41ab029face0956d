"""The current code can present every committed result and its goals."""

import importlib
from pathlib import Path

import pytest

from benchmarks.experiments import sections
from boost.errors import ConfigError
from boost.measure import results
from boost.measure.document import Goal, Table

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
MODULES = {
    "curves": "benchmarks.experiments.curves",
    "recompute": "benchmarks.experiments.recompute",
    "fit": "benchmarks.experiments.fit",
    "perplexity": "benchmarks.experiments.perplexity_report",
    "families": "benchmarks.experiments.families",
    "validation": "boost.measure.validate_report",
}


def test_every_experiment_is_in_one_chapter() -> None:
    names = [name for of_chapter in sections.CHAPTERS.values() for name in of_chapter]
    assert sorted(names) == sorted(sections.MODULES)
    assert sections.chapter("gemms") == "GEMMs" and sections.place("wire") < sections.place("gemms")
    with pytest.raises(ConfigError, match="'odd' is in no chapter"):
        sections.chapter("odd")


def module_and_facts(name: str) -> tuple[object, results.Facts]:
    return importlib.import_module(MODULES[name]), results.read(RESULTS / f"{name}.json", name)


@pytest.mark.parametrize("name", MODULES)
def test_a_committed_result_is_shown(name: str, tmp_path: Path) -> None:
    module, facts = module_and_facts(name)
    section = module.section(facts)  # type: ignore[attr-defined]
    results.save_section(tmp_path / name, facts, section)
    tables = [part for part in section.parts if isinstance(part, Table)]
    assert tables and all(table.rows for table in tables)
    for table in tables:
        assert {len(row) for row in table.rows} == {len(table.headings)}, table.caption
    text = (tmp_path / f"{name}.md").read_text(encoding="utf-8")
    assert text.count("\n| ") == sum(1 + len(table.rows) for table in tables)
    drawn = [] if name == "fit" else [f"{name}.svg"]
    assert sorted(path.name for path in tmp_path.glob("*.svg")) == drawn


def goals_of(name: str) -> list[Goal]:
    module, facts = module_and_facts(name)
    found: list[Goal] = module.goals(facts)  # type: ignore[attr-defined]
    return found


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
    module, facts = module_and_facts("recompute")
    (checkpointing,) = goals_of("recompute")
    found = [each for each in module.added_times(facts["rows"]) if (each.layout, each.policy) == BTP_LOW_RANK]  # type: ignore[attr-defined]
    assert len(found) == 2
    for each in found:
        assert f"batch {each.batch}: {each.against_full_block:.2f}" in checkpointing.found
    assert checkpointing.met is False
    for ratios, met, remark in (
        ({4: [1.7], 8: [1.7]}, True, False),
        ({4: [1.3, 1.7, 2.1], 8: [1.7]}, False, False),  # the interval reaches below 1.4
        ({4: [1.69], 8: [1.7]}, False, True),
    ):
        (goal,) = module.goals({**facts, "rows": rows_with(facts["rows"], ratios)})  # type: ignore[attr-defined]
        assert goal.met is met and ("Below it at batch 4" in goal.remark) is remark
    assert [goals_of(name) for name in ("curves", "fit", "families")] == [[], [], []]


def test_goals_of_the_performance_model_name_what_is_beyond_them() -> None:
    report = importlib.import_module("boost.measure.validate_report")
    _, facts = module_and_facts("validation")
    rows = facts["machine"]["rows"]
    rows[:] = [row | {"measured_s": row["predicted_s"]} for row in rows]
    goals = {goal.what: goal for goal in report.goals(facts)}
    assert list(goals) == [f"performance model: {what}" for what in ("time", "bytes", "memory", "published ratios")]
    assert all(goal.met for goal in goals.values())
    rows[2]["measured_s"] = rows[2]["predicted_s"] / 1.2
    rows[3]["counted_sent"] = 2 * rows[3]["predicted_sent"] + 1
    goals = {goal.what: goal for goal in report.goals(facts)}
    time, sent = goals["performance model: time"], goals["performance model: bytes"]
    assert not time.met and "18 of 19" in time.found and "+20.0%" in time.found and rows[2]["name"] in time.remark
    assert not sent.met and rows[3]["name"] in sent.remark
    assert goals["performance model: memory"].met
    unmeasured = {goal.what: goal for goal in report.goals(facts | {"machine": None})}
    assert unmeasured["performance model: time"].met is None and unmeasured["performance model: published ratios"].met
