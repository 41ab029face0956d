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


def test_goals_say_what_was_found_and_whether_it_is_enough() -> None:
    (checkpointing,) = goals_of("recompute")
    _, facts = module_and_facts("recompute")
    low_rank = [r for r in facts["rows"] if (r["layout"], r["policy"]) == ("btp, online", "low-rank")]
    assert len(low_rank) == 2
    for row in low_rank:
        assert f"batch {row['batch']}: {row['against_full_block']:.2f}" in checkpointing.found
    assert checkpointing.met is False
    for row in low_rank:
        row |= {"against_full_block": 1.7, "against_full_block_interval": [1.5, 2.0]}
    recompute = importlib.import_module("benchmarks.experiments.recompute")
    assert recompute.goals(facts)[0].met and "Below" not in recompute.goals(facts)[0].remark
    low_rank[0]["against_full_block_interval"] = [1.3, 2.0]
    assert not recompute.goals(facts)[0].met and "Below" not in recompute.goals(facts)[0].remark
    low_rank[0]["against_full_block_interval"] = [1.5, 2.0]
    low_rank[0]["against_full_block"] = 1.69
    assert not recompute.goals(facts)[0].met and "batch 4" in recompute.goals(facts)[0].remark
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
