"""The modeled evaluation: the published rows are the validated ones, the goals are of the best layout, nothing is 'measured'."""

from functools import cache
from pathlib import Path

from boost.bench import modeled
from boost.bench.goals import target_of
from boost.cli import bench_modeled
from boost.measure.document import Table
from boost.measure.results import Facts, figures
from boost.plan.hardware import load_hardware
from boost.plan.published import STEPS, Comparison


@cache
def facts() -> Facts:
    return modeled.model(["h100-80g"])


def test_the_papers_rows_stand_beside_the_validated_predictions() -> None:
    steps = Comparison(load_hardware("a100-80g")).steps()
    for row, step, published in zip(facts()["paper"], steps, STEPS, strict=True):
        assert row["published"] == published.seconds and row["modeled"] == step.seconds
        assert (row["strong"] is None) == (published.tp == 1)
        if row["strong"]:  # what our code sends less than the paper's, and what strong baselines do better
            assert row["strong"]["btp"] < row["modeled"]["BOOST"]
            assert row["strong"]["vanilla"] < row["modeled"]["vanilla"]


def test_goals_are_what_the_best_layout_gains() -> None:
    found = modeled.goals(facts())
    assert [target_of(goal.what).what for goal in found] == [
        "best low-rank layout against strong vanilla",
        "best low-rank layout against full-rank megatron-sp",
    ]
    for goal, over in zip(found, ("vanilla", "megatron-sp"), strict=True):
        gains = [
            row["seconds"][over] / min(row["seconds"]["btp"], row["seconds"]["btp-sp"]) for row in facts()["scaled"]
        ]
        assert goal.kind == "modeled" and goal.met == (min(gains) >= modeled.AGAINST[over])
        assert goal.found == f"TP 4: {gains[0]:.2f}x; TP 8: {gains[1]:.2f}x"
        assert bool(goal.remark) != goal.met


def test_every_table_says_that_it_is_modeled_and_every_cell_is_full() -> None:
    tables = [part for part in modeled.section(facts()).parts if isinstance(part, Table)]
    assert len(tables) == 4
    for table in tables:
        assert ("modeled" in table.caption and "All of them fit" in table.caption) or table in tables[:2]
        assert all(len(row) == len(table.headings) and all(row) for row in table.rows)
    assert [len(table.rows) for table in tables] == [5, 5, 2, 4]


def test_a_layout_that_does_not_fit_is_named() -> None:
    row = facts()["scaled"][0]
    assert "vanilla on h100-80g, 4 x 1" in modeled._memory_words(
        [row | {"peak_bytes": row["peak_bytes"] | {"vanilla": row["usable_bytes"] + 1}}]
    )


def test_the_figures_are_drawn(tmp_path: Path) -> None:
    for figure in figures(modeled.section(facts())):
        figure.draw(tmp_path / f"{figure.name}.svg")
        assert (tmp_path / f"{figure.name}.svg").read_text().count("<path") > 20


def test_the_command_line_knows_the_usual_hardware() -> None:
    assert bench_modeled.HARDWARE == modeled.HARDWARE
