"""`boost plan validate --record`: stable halves, errors by group, and the report."""

import json
from pathlib import Path

import pytest

from benchmarks.experiments.goals import target_of
from boost.cli.main import main
from boost.measure import record as measured
from boost.measure.document import Table
from boost.measure.record import FITTED, HELD, compare, errors, halves, section
from boost.measure.results import figures
from boost.plan.interval import SHARE, spreads
from boost.plan.record import record

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def facts() -> measured.Facts:
    return compare()


def test_half_of_each_source_and_gpu_is_held_out_always_the_same() -> None:
    rows = record().rows
    found = halves(rows)
    assert found == halves(rows)
    for kind in {(row.source, row.gpu) for row in rows}:
        of_kind = [half for row, half in zip(rows, found, strict=True) if (row.source, row.gpu) == kind]
        assert of_kind.count(FITTED) - of_kind.count(HELD) in (0, 1)


def test_the_held_out_half_is_predicted(facts: measured.Facts) -> None:
    held = [row for row in facts["rows"] if row["half"] == HELD]
    assert errors(held).mape <= measured.LIMIT and measured.holds(facts)
    assert not measured.holds(
        facts | {"rows": [row | {"predicted_s": 1.2 * row["measured_s"]} for row in facts["rows"]]}
    )


def test_what_is_shipped_is_what_the_fitted_half_says(facts: measured.Facts) -> None:
    """boost/plan/intervals.toml matches these spreads, and 80 % of held-out rows lie inside."""
    found = measured.spreads(facts)
    assert found == {kind: spread for kind, spread in spreads().items() if kind not in ("calibrated", "unmeasured")}
    assert sum(measured.held_by_interval(facts)) >= SHARE * len(measured.held_by_interval(facts))
    steps = json.loads(Path("benchmarks/results/validation.json").read_text())["machine"]["rows"]
    assert measured.spread_of([row["measured_s"] / row["predicted_s"] for row in steps]) == spreads()["calibrated"]


def test_a_biased_group_fails(facts: measured.Facts) -> None:
    """If only the A100s are 10 % too slow, the mean error stays within its limit, but the bias of that group does not."""
    wrong = [
        row | {"predicted_s": row["predicted_s"] * (1.12 if row["gpu"] == "a100-40g-8" else 1.0)}
        for row in facts["rows"]
    ]
    error, _ = measured.goals(facts | {"rows": wrong})
    assert not error.met and "a100-40g-8" in error.remark and errors(wrong).mape < measured.LIMIT


def test_errors_of_some_rows() -> None:
    rows = [{"measured_s": 1.0, "predicted_s": s} for s in (0.9, 1.0, 1.3)]
    found = errors(rows)
    assert (found.count, found.median) == (3, 1.0)
    assert found.mape == pytest.approx(0.4 / 3) and found.bias == pytest.approx(0.2 / 3)


def test_the_report(facts: measured.Facts, tmp_path: Path) -> None:
    shown = section(facts)
    tables = [part for part in shown.parts if isinstance(part, Table)]
    assert len(tables[-1].rows) == len(facts["rows"])
    for table in tables:
        assert {len(row) for row in table.rows} == {len(table.headings)}
    sizes = [row[1] for row in tables[0].rows if row[0] in ("tokens per sequence", "GPUs")]
    assert sizes == ["up to 2,048", "up to 4,096", "up to 8,192", "longer", "up to 8", "up to 64", "up to 512", "more"]
    error, interval = measured.goals(facts)
    assert {target_of(goal.what).experiment for goal in (error, interval)} == {"record"} and "MAPE" in error.found
    (figure,) = figures(shown)
    figure.draw(tmp_path / "record.svg")
    assert (tmp_path / "record.svg").stat().st_size > 10_000


def test_the_command(
    facts: measured.Facts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measured, "compare", lambda show: facts)
    out = tmp_path / "record"
    assert main(["plan", "validate", "--record", "--write", "--out", str(out)]) == 0
    assert "llm-foundry" in capsys.readouterr().out
    assert (
        json.loads(out.with_suffix(".json").read_text())["seed"] == measured.SEED and out.with_suffix(".svg").exists()
    )
    assert main(["plan", "validate", "--record", "--measure"]) == 2
    assert "remove --measure" in capsys.readouterr().err
