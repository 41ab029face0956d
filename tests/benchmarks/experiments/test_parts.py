"""The ablation: every step is a legal configuration that differs from the previous one as stated."""

import itertools
from pathlib import Path

import pytest

from benchmarks.experiments import parts
from benchmarks.experiments.endtoend import Machine
from benchmarks.experiments.side_by_side import TimingGroup
from boost.config.schema import ParallelConfig
from boost.measure.document import Table
from boost.measure.results import figures, read
from tests.benchmarks.experiments.groups import measured, tiny


def test_rungs_change_one_thing_at_a_time() -> None:
    group = parts.ladder(Machine("cpu", 2, None), 2, "bfloat16", True, [], "demo")
    assert list(group.contenders) == [ablation.name for ablation in parts.ablation_steps(compiled=True)]
    found = [config.model_dump() for config in group.contenders.values()]
    for config in found:  # what only some layouts have
        config["parallel"] = {**ParallelConfig.absent, **config["parallel"]}
    changes = [
        {key for part in ("parallel", "train") for key in now[part] if now[part][key] != before[part][key]}
        for before, now in itertools.pairwise(found[1:])
    ]
    assert changes == [
        {"vanilla", "grouping"}, {"layout", "norm", "grouping"}, {"grouping"}, {"norm"}, {"layout"}, {"compile"},
        {"compile", "recompute"}, {"recompute"},
    ]  # fmt: skip
    assert {config.model.dim for config in group.contenders.values()} == {1024}
    assert [config.model.family for config in group.contenders.values()][:2] == ["dense", "cola"]


def test_the_experiment_leaves_a_table_and_a_waterfall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        ablation.name: tiny(dict(ablation.parallel), ablation.family, layers=2, **ablation.train)
        for ablation in parts.ablation_steps(compiled=False)
    }
    group = TimingGroup("TP 2", parts.LADDER, found)
    facts = measured([group])
    monkeypatch.setattr(parts, "run_groups", lambda *_: (facts, []))
    out = tmp_path / "parts"
    assert parts.parts(Machine("cpu", 2, None), [group], 7, out) == 0
    written = read(out.with_suffix(".json"), "parts")
    assert (tmp_path / "parts.svg").read_text().startswith("<?xml")
    shown = parts.section(written)
    (table,) = (part for part in shown.parts if isinstance(part, Table))
    assert [row[0] for row in table.rows] == list(found)
    assert table.rows[0][3:5] == ("", "") and all(len(row) == len(table.headings) for row in table.rows)
    rows = {row["name"]: row for row in written["groups"][0]["rows"]}
    # Online sends no statistic by itself; low-rank recomputation sends nothing again, whole blocks do; both keep less.
    assert rows["btp, online"]["collectives"]["all-reduce"] < rows["btp, sync, grouped"]["collectives"]["all-reduce"]
    assert (
        rows["btp-sp, low-rank"]["sent_bytes"]
        == rows["btp-sp"]["sent_bytes"]
        < rows["btp-sp, full-block"]["sent_bytes"]
    )
    assert rows["btp-sp, low-rank"]["peak_bytes"] < rows["btp-sp"]["peak_bytes"]
    assert len(figures(shown)) == 1 and parts.goals(written) == []


def test_ratios_are_to_the_rung_before_and_to_the_first() -> None:
    rows = [{"name": name, "seconds": [seconds] * 7} for name, seconds in (("a", 6.0), ("b", 3.0), ("c", 4.0))]
    found = [(name, before.value, first.value) for name, before, first in parts.before_each({"rows": rows})]
    assert found == [("a", 1, 1), ("b", 2, 2), ("c", 0.75, 1.5)]
