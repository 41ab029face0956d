"""The ladder: its order, what each step is compared with, and intervals, on made-up seconds."""

import pytest

from benchmarks.experiments.ladder import LADDER, facts_from, measured_steps, ratios
from benchmarks.experiments.steps import BTP, BTP_SP, PUBLISHED, VANILLA
from benchmarks.experiments.wire_plan import BTP_CP, BTP_SYNC, BTP_UNGROUPED, FORMS, MAIN
from boost.config.schema import ParallelConfig
from tests.benchmarks.experiments.wires import made_up

SECONDS = {step.name: 4.0 - 0.25 * place for place, step in enumerate(LADDER)}


def test_every_step_is_in_the_main_set_and_changes_what_it_says() -> None:
    assert [step.name for step in LADDER][:5] == [PUBLISHED, VANILLA, BTP_UNGROUPED, BTP_SYNC, BTP]
    assert {step.name for step in LADDER} <= {each.name for each in MAIN.groups[0].contenders}
    contenders = {each.name: each for each in MAIN.groups[0].contenders}
    changes = {}
    for step in LADDER[1:]:
        before, now = (contenders[name] for name in (step.before, step.name))
        options = [{**ParallelConfig.absent, "grouping": True, **FORMS[each.form]} for each in (before, now)]
        changed = {key for key in options[0] | options[1] if options[0].get(key) != options[1].get(key)}
        changed |= {key for key in ("overlap", "compile") if getattr(before, key) != getattr(now, key)}
        changes[step.name] = changed
    assert list(changes.values()) == [
        {"vanilla"}, {"layout", "norm", "grouping"}, {"grouping"}, {"norm"}, {"overlap"}, {"layout"}, {"overlap"}, {"layout"},
        {"overlap"}, {"compile"},
    ]  # fmt: skip


def test_ratios_are_to_the_step_before_and_to_the_first() -> None:
    facts = facts_from(made_up(SECONDS))
    assert facts["wires"] == {"share-matched": 400.0, "slow": 100.0}
    assert [len(launch) for launch in facts["steps"][0]["seconds"]["slow"]] == [7, 7, 7]
    found = {step["name"]: each for step, *each in ratios(facts, "slow")}
    assert found[PUBLISHED] == [None, None]
    to_before, to_first = found[BTP_SYNC]
    assert to_before is not None and to_before.value == pytest.approx((3.5 + 1) / (3.25 + 1))
    assert to_first is not None and to_first.value == pytest.approx((4 + 1) / (3.25 + 1))
    assert to_before.low <= to_before.value <= to_before.high
    to_before, _ = found[BTP_SP]  # compared with btp, not with the alternatives above it in the table
    assert to_before is not None and to_before.value == pytest.approx((3.0 + 1) / (2.0 + 1))


def test_steps_without_a_measurement_are_passed_over() -> None:
    some = [PUBLISHED, VANILLA, BTP, BTP_SP, BTP_CP]
    assert [(step.name, step.before) for step in measured_steps(some)] == [
        (PUBLISHED, ""), (VANILLA, PUBLISHED), (BTP, VANILLA), (BTP_CP, BTP), (BTP_SP, BTP),
    ]  # fmt: skip
