"""TP against the ideal: the replayed collectives are those of a step, and ratios are within a round."""

from pathlib import Path

import pytest

from benchmarks.experiments import ideal as bench
from benchmarks.experiments.contest import LEAST_ROUNDS
from benchmarks.experiments.ideal_report import ALONE, LAYOUTS, WIRE, draw, efficiency, goals
from benchmarks.experiments.single import our_step
from boost.config import Config
from boost.measure import results
from boost.measure.results import Facts
from tests import toy
from tests.distributed import run_distributed


def make() -> Config:
    return toy.toy_config("float32", parallel={"layout": "btp", "tp": 2}, model={"kv_heads": 8}, run={"device": "cpu"})


def measured(config: Config) -> tuple[Facts, dict[str, bool]]:
    """The experiment's result, and whether the replayed collectives of each layout match those of its step."""
    mesh = toy.mesh(tp=2)
    same = {}
    for layout, each in bench.variants(config).items():
        issued = bench.count(our_step(each, mesh))
        again = bench.count(bench.replay(issued, mesh.tp, mesh.device))
        same[layout] = [c.on_the_wire for c in issued] == [c.on_the_wire for c in again] and len(issued) > 4
    return bench.measure(config, mesh, LEAST_ROUNDS), same


def test_measured_on_two_processes(tmp_path: Path) -> None:
    config = make()
    found, same = run_distributed(2, measured, config)[0]
    assert same == dict.fromkeys(LAYOUTS, True)
    assert set(found["turns"]["seconds"]) == {*LAYOUTS, *(WIRE + x for x in LAYOUTS), ALONE + "cola", ALONE + "dense"}
    assert found["sent_bytes"]["btp-sp"] < found["sent_bytes"]["btp"] < found["sent_bytes"]["vanilla"]
    facts = results.facts_of("ideal", config, rounds=LEAST_ROUNDS, tp=2, device="cpu", **found)
    results.save_section(tmp_path / "ideal", facts, bench.section(facts))
    assert "| megatron-sp | dense |" in (tmp_path / "ideal.md").read_text(encoding="utf-8")
    assert (tmp_path / "ideal-parts.svg").stat().st_size > 0


def facts_with(step: float) -> Facts:
    """TP=1 takes 2 s and the wire 0.5 s; slow rounds take three times as long."""
    slow = [1.0] * 4 + [3.0] * 3
    seconds = (
        dict.fromkeys(LAYOUTS, step) | {WIRE + x: 0.5 for x in LAYOUTS} | {ALONE + "cola": 2.0, ALONE + "dense": 2.0}
    )
    return {
        "tp": 2, "device": "cpu", "rounds": 7, "families": bench.families(make()), "config": make().model_dump(),
        "turns": {"seconds": {name: [s * x for x in slow] for name, s in seconds.items()}},
    }  # fmt: skip


def test_efficiency_and_goal(tmp_path: Path) -> None:
    facts = facts_with(1.6)
    assert efficiency(facts, "btp").value == pytest.approx(1.5 / 1.6)
    (goal,) = goals(facts)
    assert goal.met and "btp-sp 0.94 (0.94 to 0.94)" in goal.found and goal.what.startswith("TP=2 against the ideal")
    assert not goals(facts_with(1.7))[0].met
    draw(facts, tmp_path / "ideal.svg")
