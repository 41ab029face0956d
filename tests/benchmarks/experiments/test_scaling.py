"""The planner's choices at the paper's sizes: batches, meshes, memory, and what the tables say of what does not fit."""

from functools import cache
from pathlib import Path

import pytest

from benchmarks.experiments import scaling
from benchmarks.experiments.document import Figure, Table
from benchmarks.experiments.results import Facts
from benchmarks.experiments.scaling import DENSE, LOW_RANK, SYSTEMS, VANILLA, by_place, gain
from boost.plan.collectives import step_collectives
from boost.plan.hardware import load_hardware

A100, H100 = "a100-80g-8", "h100-80g"
TITLES = {name: load_hardware(name).title for name in (A100, H100)}


@cache
def found() -> list[Facts]:
    return [row for name in (A100, H100) for row in scaling.of_size(name, "7B", (4, 32))]


def test_batches_are_the_papers_then_grow_with_the_gpus() -> None:
    assert [scaling.sequences(gpus) for gpus in scaling.GPUS] == [4, 4, 4, 8, 16, 32, 64, 128]


def test_every_system_uses_all_gpus_with_tp_inside_a_node() -> None:
    assert len(found()) == 2 * 2 * len(SYSTEMS)
    for row in found():
        assert row["tp"] * row["pp"] * row["dp"] == row["gpus"] and row["tp"] <= 8
        assert row["fits"] == (row["peak_bytes"] <= row["usable_bytes"])
        assert row["tokens_per_second"] == pytest.approx(4096 * row["sequences"] / row["seconds"])
        assert 0 < row["mfu"] < 1 and row["sent_bytes"] > 0
        if row["tp"] > 1:
            allowed = {DENSE: ("megatron", "megatron-sp", "ulysses"), VANILLA: ("vanilla",)}
            assert row["layout"] in allowed.get(row["system"], ("btp", "btp-sp", "btp-cp"))
    for systems in by_place(found()):
        assert systems[LOW_RANK]["seconds"] <= systems[VANILLA]["seconds"], "vanilla at TP 1 is one of its choices"


def test_the_same_numbers_in_other_processes() -> None:
    assert scaling.compute([A100, H100], ["7B"], [4]) == [row for row in found() if row["gpus"] == 4]


def test_bytes_sent_are_those_of_the_collective_table() -> None:
    row = next(row for row in found() if (row["system"], row["gpus"], row["hardware"]) == (LOW_RANK, 32, A100))
    changes = {key: row[key] for key in ("tp", "pp", "dp", "shard", "overlap", "layout")}
    config = scaling.configuration("7B", 32, LOW_RANK)
    asked = config.parallel.model_copy(update=changes)
    train = config.train.model_copy(update={"micro_batch": row["micro_batch"], "recompute": row["recompute"]})
    whole = config.model_copy(update={"parallel": asked, "train": train})
    assert row["sent_bytes"] == pytest.approx(sum(each.sent_bytes for each in step_collectives(whole)), rel=0.02)


def test_what_does_not_fit_says_how_much_it_needs() -> None:
    rows = [dict(row) for row in found() if row["hardware"] == A100 and row["gpus"] == 4]
    rows[0] |= {"fits": False, "peak_bytes": 95_400_000_000}
    (systems,) = by_place(rows)
    assert gain(systems, DENSE) is None and (gain(systems, VANILLA) or 0) >= 1
    _, table, _ = scaling.parts(rows, TITLES)
    assert isinstance(table, Table)
    (cells,) = table.rows
    assert (
        cells[2].startswith("does not fit (95 GB) / ") and cells[3].startswith("- / ") and cells[-1].startswith("-, ")
    )


def test_tables_have_at_most_nine_columns_and_the_figure_is_drawn(tmp_path: Path) -> None:
    words, *tables, figure = scaling.parts(found(), TITLES)
    assert isinstance(words, str) and isinstance(figure, Figure)
    for table in tables:
        assert isinstance(table, Table) and "modeled" in table.caption
        assert len(table.headings) == 9 and {len(row) for row in table.rows} == {9} and len(table.rows) == 2
        assert all(cell.count(" / ") == 2 for row in table.rows for cell in row[2:8])
    figure.draw(tmp_path / "f.svg")
    assert (tmp_path / "f.svg").read_text().startswith("<?xml")
