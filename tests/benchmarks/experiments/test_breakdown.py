"""The breakdown: parts sum to the step, measured and modeled."""

from pathlib import Path

import pytest

from benchmarks.experiments import breakdown_report
from benchmarks.experiments.breakdown import MODELED_PARTS, OURS, PUBLISHED_NAMES, facts_from, slower, total
from benchmarks.experiments.endtoend import BTP, MEGATRON, PUBLISHED, VANILLA
from boost.measure.document import Table
from boost.measure.results import Facts, figures
from boost.measure.validate import PAPERS_HARDWARE
from boost.plan.hardware import load_hardware
from boost.plan.published import STEPS, Comparison, configuration
from boost.plan.step_time import PARTS as STEP_PARTS
from boost.plan.timing import Predictor
from tests.benchmarks.experiments.wires import made_up

SECONDS = {MEGATRON: 2.0, PUBLISHED: 2.0, VANILLA: 3.0, BTP: 1.0}


def recorded() -> Facts:
    """A result whose launches recorded one step of each layout on both processes, each on both marked wires."""
    facts = made_up(SECONDS)
    for launch in facts["groups"]:
        if launch["wire"] != "no limit":
            step = {"gemms": 0.4, "other": 0.3, "waiting": 0.2 + launch["launch"], "rest": 0.1}
            launch["broken_down"] = {name: [step, {**step, "rest": 0.3}] for name in SECONDS}
    return facts


@pytest.fixture(scope="module")
def facts() -> Facts:
    return facts_from(recorded())


def test_measured_parts_are_means_that_sum_to_the_step(facts: Facts) -> None:
    assert [(row["wire"], row["name"]) for row in facts["measured"]] == [
        (wire, name) for wire in ("share-matched", "slow") for name in SECONDS
    ]
    for row in facts["measured"]:
        assert row["recorded"] == 6
        assert row["parts_s"] == pytest.approx({"gemms": 0.4, "other": 0.3, "waiting": 1.2, "rest": 0.2})
        assert total(row) == pytest.approx(2.1)


def test_modeled_parts_sum_to_the_predicted_step(facts: Facts) -> None:
    assert sorted(part for parts in MODELED_PARTS.values() for part in parts) == sorted(STEP_PARTS), "each in one part"
    hardware = load_hardware(PAPERS_HARDWARE)
    rows = {row["name"]: row for row in facts["modeled"]}
    assert list(rows) == [*PUBLISHED_NAMES.values(), *OURS]
    published = next(step for step in Comparison(hardware).steps() if step.row == STEPS[2])
    for way, name in PUBLISHED_NAMES.items():
        assert total(rows[name]) == pytest.approx(published.seconds[way])
        assert rows[name]["published_s"] == STEPS[2].seconds[way]
    for name, (way, overrides) in OURS.items():
        predicted = Predictor(hardware).predict(configuration(way, STEPS[2], more=overrides))
        assert total(rows[name]) == pytest.approx(predicted.seconds)
        assert rows[name]["parts_s"]["waiting"] > 0
    vanilla, dense = PUBLISHED_NAMES["vanilla"], PUBLISHED_NAMES["full-rank"]
    ratio = published.seconds["vanilla"] / published.seconds["full-rank"]
    assert slower(facts["modeled"], vanilla, dense) == pytest.approx(ratio - 1)


def test_the_report_says_how_vanilla_compares_with_dense(facts: Facts, tmp_path: Path) -> None:
    section = breakdown_report.section(facts)
    measured, modeled = (part for part in section.parts if isinstance(part, Table))
    assert measured.rows[0][:3] == ("share-matched", MEGATRON, "2100")
    assert measured.rows[0][3:6] == ("400 (19%)", "300 (14%)", "1200 (57%)")
    assert len(modeled.rows) == len(facts["modeled"]) and all(len(row) == len(modeled.headings) for row in modeled.rows)
    prose = " ".join(part for part in section.parts if isinstance(part, str))
    assert f"share-matched wire, time of {PUBLISHED} / {MEGATRON}: 1.00 (1.00 to 1.00), no difference shown" in prose
    assert f"slow wire, time of {VANILLA} / {MEGATRON}: 1.33 (1.33 to 1.33)" in prose
    assert "by the paper's step times, 55% more time; by the model, 36% more time" in prose
    assert [figure.name for figure in figures(section)] == ["breakdown", "breakdown-modeled"]
    for figure in figures(section):
        figure.draw(tmp_path / f"{figure.name}.svg")
        assert (tmp_path / f"{figure.name}.svg").stat().st_size > 1000
    assert breakdown_report.goals(facts) == []


def test_a_result_of_an_older_version_has_only_the_modeled_half(facts: Facts) -> None:
    older = facts_from(made_up(SECONDS))
    assert older["measured"] == [] and older["modeled"] == facts["modeled"]
    section = breakdown_report.section(older)
    assert "Not measured: the result of the wire experiment has no steps recorded by part." in section.parts
    assert [figure.name for figure in figures(section)] == ["breakdown-modeled"]
