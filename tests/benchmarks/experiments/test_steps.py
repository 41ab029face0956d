"""Whole steps under every layout are timed in one run, counted, and shown next to the paper's."""

from functools import cache
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks.commands import LEAST_ROUNDS, result_of
from benchmarks.experiments import shares, side_by_side, steps
from benchmarks.experiments.contest import refuse_zeros
from benchmarks.experiments.results import Facts, MeasurementError, facts_of
from benchmarks.experiments.shares import exposed_collectives
from benchmarks.experiments.side_by_side import TimingGroup
from benchmarks.experiments.steps import BTP, BTP_SP, MEGATRON, MEGATRON_SP, PUBLISHED, VANILLA, Machine
from benchmarks.experiments.steps_report import goals
from boost.config.schema import ParallelConfig
from boost.errors import ConfigError
from boost.measure.steps import Stepper
from boost.plan.hardware import load_hardware
from boost.plan.timing import predict
from boost.train.launch import can_fork
from tests import toy
from tests.benchmarks.experiments.groups import measured, tiny

LAYOUTS = {name: steps.PARALLEL[name] for name in (MEGATRON, MEGATRON_SP, VANILLA, PUBLISHED, BTP, BTP_SP)}


def layout(name: str, **more: Any) -> Any:
    return tiny(LAYOUTS[name], "dense" if name.startswith("megatron") else "cola", **more)


@cache
def results() -> Facts:
    groups = measured([TimingGroup("cut", steps.WEAK_SCALING, {name: layout(name) for name in LAYOUTS})])
    return facts_of("steps", layout(BTP), rounds=7, groups=groups, left_out=["shares: no profile"])


def rows(group: Facts) -> dict[str, Facts]:
    return {row["name"]: row for row in group["rows"]}


def test_every_contender_is_timed_in_every_round_and_counted() -> None:
    cut, *_ = results()["groups"]
    found = rows(cut)
    assert list(found) == list(LAYOUTS)
    for row in found.values():
        assert len(row["seconds"]) == LEAST_ROUNDS and min(row["seconds"]) > 0
        assert row["sent_bytes"] > row["sent_in_blocks"] > 0 < row["peak_bytes"]
        assert row["config"]["train"]["compute_dtype"] == "float32"
    assert found[BTP]["parameters"] < found[MEGATRON]["parameters"]
    # 14r of btp-sp over 28r of btp, whose statistic adds two numbers a token, all-reduced once.
    assert found[BTP_SP]["sent_in_blocks"] / found[BTP]["sent_in_blocks"] == pytest.approx(14 * 8 / (28 * 8 + 4))


def test_bytes_that_are_not_in_the_table_are_not_accounted_for() -> None:
    with pytest.raises(MeasurementError, match="collectives that differ from the collective table"):
        side_by_side.sent_in_blocks(layout(BTP), [])


def test_it_is_never_slower_only_if_the_whole_interval_says_so() -> None:
    group = results()["groups"][0]
    seconds = {BTP_SP: [1.0, 1.0, 1.3, 1.0, 1.0, 1.3, 1.3], BTP: [1.1, 0.9, 1.2, 1.1, 1.0, 1.2, 1.2]}
    rows = [row | {"seconds": seconds.get(row["name"], row["seconds"])} for row in group["rows"]]
    assert [goal.met for goal in goals(results() | {"groups": [group | {"rows": rows}]})] == [False]


def test_a_share_computes_on_numbers_and_is_priced() -> None:
    """Runs in a separate process, because the fake process group must be the only one."""
    found = {name: layout(name, tp=4) for name in (MEGATRON_SP, VANILLA, BTP, BTP_SP)}
    group, hardware = TimingGroup("share", steps.SHARES, found, share=True), load_hardware("a100-80g")
    facts = result_of(share_of_its_own, (group, hardware), 1, forks=can_fork())
    assert facts["tp"] == 4 and facts["processes"] == 1 and "A100" in facts["priced_by"]
    assert facts["waits_s"] == {name: exposed_collectives(predict(config, hardware)) for name, config in found.items()}
    assert all(waits > 0 for waits in facts["waits_s"].values())
    seconds = side_by_side.seconds_of(facts, BTP)[0].tolist()
    assert seconds == [taken + facts["waits_s"][BTP] for taken in rows(facts)[BTP]["seconds"]]


def share_of_its_own(group: TimingGroup, hardware: Any) -> Facts:
    facts = side_by_side.measured(group, LEAST_ROUNDS, 1, hardware)
    with shares.without_the_others(ParallelConfig(tp=4), toy.CPU) as mesh:
        refuse_zeros("share", Stepper(layout(BTP_SP, tp=4), mesh).step())
    assert not dist.is_initialized()
    return facts


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_groups_are_legal_and_wider_with_tp(device: str) -> None:
    hardware = load_hardware("h200-141g")
    found = steps.groups(Machine(device, 2, hardware))
    assert len({group.name for group in found}) == len(found)
    assert {group.parallel.tp for group in found if group.share} == ({4, 8} if device == "cpu" else {2, 4, 8})
    dims = {
        group.parallel.tp: config.model.dim
        for group in found
        if group.purpose == steps.WEAK_SCALING
        for config in group.contenders.values()
    }
    assert dims == ({1: 512, 2: 1024} if device == "cpu" else {1: 2048, 2: 3072})
    if device == "cpu":
        cut = [group.name for group in found if group.parallel.tp == 2 and group.peers]
        assert cut == ["weak scaling, TP 2, float32"]


def test_without_a_profile_of_this_machine_shares_are_left_out() -> None:
    machine = steps.machine_of("cpu", 2, None)
    assert machine.hardware is None and "boost plan calibrate" in machine.why_no_shares
    assert not any(group.share for group in steps.groups(machine))
    with pytest.raises(ConfigError, match=r"--hardware = 'h100-80g' is a cuda profile"):
        steps.machine_of("cpu", 2, "h100-80g")
