"""Goals and tables of the wire experiment, of made-up seconds."""

import pytest

from benchmarks.experiments import wire_report
from benchmarks.experiments.goals import target_of
from benchmarks.experiments.results import Facts
from benchmarks.experiments.steps import BTP, BTP_SP
from benchmarks.experiments.wire_plan import BTP_CP, BTPS, MEGATRONS, VANILLAS
from tests.benchmarks.experiments.wires import made_up

NAMES = [each.name for each in (*MEGATRONS, *VANILLAS, *BTPS)]
SECONDS = {name: 2.0 if name.startswith((BTP, BTP_SP)) else 3.0 for name in NAMES}


@pytest.fixture
def facts() -> Facts:
    return made_up(SECONDS)


def test_goals_are_read_at_the_worse_end(facts: Facts) -> None:
    found = {goal.what: goal for goal in wire_report.goals(facts)}
    assert all(target_of(what).experiment == "wire" for what in found)
    hidden = found["communication of TP hidden"]  # the slow wire adds a third of a step of btp, and less of the others
    assert hidden.met is None and hidden.found.startswith("on no wire 40% to 60% of a step: megatron, megatron-sp,")
    matched = found["share-matched wire: best low-rank layout against published vanilla"]
    assert matched.found == "1.56 (1.56 to 1.56) x (btp, online, halves)" and matched.met is False
    assert matched.where.endswith("; 400 Mbit/s")
    assert found["slow wire: best low-rank layout against strong vanilla"].found.startswith("1.40 (1.40 to 1.40)")
    assert found["slow wire: btp-sp against btp"].found.startswith("1.00")


def test_hidden_communication_counts_where_it_is_half_of_the_step() -> None:
    """The slow wire adds 1 s, and half of that with overlap."""
    seconds = dict.fromkeys(NAMES, 3.0) | dict.fromkeys([BTP, f"{BTP}, halves", BTP_CP, f"{BTP_CP}, halves"], 1.0)
    found = {goal.what: goal for goal in wire_report.goals(made_up(seconds))}["communication of TP hidden"]
    by_layout = found.found.split("; ")
    assert [each.split(":")[0] for each in by_layout[:2]] == ["btp, online at 100 Mbit/s", "btp-cp at 100 Mbit/s"]
    assert by_layout[0].split(": ")[1].startswith("0.5") and found.met is False
    assert by_layout[2].endswith("40% to 60% of a step: megatron, megatron-sp, btp-sp, vanilla")


def test_steps_of_many_tokens_have_goals_of_their_own() -> None:
    """Uses the faster form of each layout; the slow wire adds 1 s to steps of 2 s and 3 s, and 0.5 s with halves."""
    seconds = {BTP: 4.0, BTP_SP: 3.0, f"{BTP_SP}, halves": 3.0, BTP_CP: 2.0, f"{BTP_CP}, halves": 2.0}
    found = wire_report.goals(made_up(seconds, name="many"))
    assert [target_of(goal.what).experiment for goal in found] == ["wire"] * 3
    assert [goal.met for goal in found] == [True, True, None]
    assert found[1].found.startswith("1.40 (1.40 to 1.40) x (btp-cp, halves against btp-sp")
