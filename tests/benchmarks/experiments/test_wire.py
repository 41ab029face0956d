"""Steps over emulated hosts with a rate-limited wire: bytes pass no faster than its rate, every mesh computes the same, and a
killed experiment resumes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.experiments import wire, wire_report
from benchmarks.experiments.hosts import why_no_hosts
from benchmarks.experiments.results import Table, figures, read
from benchmarks.experiments.steps import BTP, MEGATRON_SP
from benchmarks.experiments.wire import WireLaunch, schedule
from benchmarks.experiments.wire_plan import (
    BTP_CP,
    HALVES,
    MAIN,
    MANY,
    MESHES,
    NO_LIMIT,
    WireContender,
    WireGroup,
    WireSet,
)
from boost.errors import ConfigError

SMALL = {"vocab_size": 32, "seq_len": 16, "micro_batch": 2, "global_batch": 4}
HALVED = WireContender(BTP, "halves")
CONTENDERS = (WireContender(MEGATRON_SP), WireContender(BTP), HALVED)
TINY = WireGroup("TP 2", (64, 2, 96, 4), SMALL, CONTENDERS, recorded=(HALVED,), collectives=True)
PLAN = WireSet("main", (TINY,), launches=2, rounds=7)


@pytest.fixture
def joined() -> None:
    if reason := why_no_hosts(limited=True):
        pytest.skip(reason)


@pytest.mark.nightly
def test_the_experiment(joined: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MIB", (1,))
    monkeypatch.setattr(wire_report, "MIB", (1,))
    monkeypatch.setattr(wire, "marked_rate", lambda free, reference, fraction: round(100 / fraction))
    out = tmp_path / "wire"
    assert wire.wire(PLAN, "demo", [], [], out) == 0
    facts = read(out.with_suffix(".json"), "wire")
    assert facts["marked"] == {"share-matched": 588, "slow": 200}
    assert [(each["wire"], each["launch"]) for each in facts["groups"]] == [
        (NO_LIMIT, 0), ("share-matched", 0), ("slow", 0), ("share-matched", 1), ("slow", 1),
    ]  # fmt: skip
    for slow in (each for each in facts["groups"] if each["wire"] == "slow"):
        for name in ("all-gather", "reduce-scatter", "all-to-all"):
            assert min(slow["collectives"][f"{name}, 1 MiB"]) > 0.8 * 2**19 * 8 / 200e6, "half crosses, at 200 Mbit/s"
        assert min(slow["collectives"]["all-reduce, 1 MiB"]) > 0.8 * 2**20 * 8 / 200e6
        assert {row["name"] for row in slow["rows"]} == {MEGATRON_SP, BTP, HALVED.name}
    assert all((tmp_path / f"{figure.name}.svg").is_file() for figure in figures(wire_report.section(facts)))
    assert not out.with_suffix(".partial").exists()


class Killed(BaseException):
    """In place of a signal."""


def fake(calls: list[tuple[str, int]], limit: int) -> Any:
    """A `measure` without processes, in which the machine is lost after `limit` launches."""

    def measure(found: Any, mbit: Any, launch: WireLaunch, configs: Any, rounds: int, draws: bool = False) -> Any:
        if len(calls) == limit:
            raise Killed
        calls.append((launch.wire, launch.number))
        seconds = [1.0 + 0.01 * n + (mbit is not None) for n in range(rounds)]
        rows = [{"name": name, "seconds": seconds, "sent_bytes": 10**7} for name in configs]
        shape = {part: getattr(configs[BTP], part).model_dump() for part in ("model", "train")}
        return {"mbit": mbit, "rows": [row | {"config": shape} for row in rows], "tp": 2, "threads": 1}

    return measure


@pytest.fixture
def without_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "why_no_hosts", lambda limited: None)
    monkeypatch.setattr(wire, "hosts", lambda count: pytest.MonkeyPatch.context())


def test_a_killed_experiment_resumes_where_it_was(
    without_hosts: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, every = tmp_path / "wire", [(each.wire, each.number) for each in schedule(PLAN, [50.0])]
    first = [(NO_LIMIT, 0), ("50 Mbit/s", 0), ("share-matched", 0), ("slow", 0)]
    assert every == [*first, ("share-matched", 1), ("slow", 1)]
    calls: list[tuple[str, int]] = []
    monkeypatch.setattr(wire, "measure", fake(calls, 3))
    with pytest.raises(Killed):
        wire.wire(PLAN, "demo", [], [50.0], out)
    assert calls == every[:3] and not out.with_suffix(".json").exists()
    kept = json.loads(out.with_suffix(".partial").read_text())
    assert len(kept["groups"]) == 3
    with pytest.raises(ConfigError, match=r"^--out = .*: rounds is 7 there and 9 here; .*wire.partial$"):
        wire.wire(replace(PLAN, rounds=9), "demo", [], [50.0], out)
    with pytest.raises(ConfigError, match=r"megatron-sp.train.seq_len is 16 there and 32 here"):
        wire.wire(PLAN, "demo", ["--train.seq_len=32"], [50.0], out)
    monkeypatch.setattr(wire, "measure", fake(calls, 99))
    assert wire.wire(PLAN, "demo", [], [50.0], out) == 0
    assert calls == every, "nothing is measured twice"
    facts = read(out.with_suffix(".json"), "wire")
    assert facts["groups"][:3] == kept["groups"] and not out.with_suffix(".partial").exists()
    assert wire.wire(PLAN, "demo", [], [50.0], out) == 0
    assert calls == every, "a finished set is not measured again"
    assert wire.wire(replace(PLAN, rounds=9), "demo", [], [50.0], out) == 0, "a finished result is replaced"
    assert read(out.with_suffix(".json"))["rounds"] == 9


def test_every_set_is_a_valid_configuration() -> None:
    assert [group.processes for group in MESHES.groups] == [4, 4, 2]
    assert "vanilla, published, halves" not in MAIN.groups[0].configs("demo", [])
    assert {"ulysses, halves", BTP, f"{BTP_CP}, halves"} <= set(MANY.groups[0].configs("demo", []))


def test_the_marked_rate_is_that_of_its_share() -> None:
    free = {"rows": [{"name": BTP, "seconds": [1.5] * 7, "sent_bytes": 10**8}]}
    for fraction in (0.17, 0.5):
        on_the_wire = 8e8 / (1e6 * wire.marked_rate(free, BTP, fraction))
        assert on_the_wire / (on_the_wire + 1.5) == pytest.approx(fraction, rel=1e-2)


def test_halves_are_predicted_to_pay_where_they_were_measured_to() -> None:
    """Measured (wire-halves.md): 0.98 (0.93 to 1.01) where communication takes 17% of a step, 1.22 where it takes half."""
    (group,) = HALVES.groups
    gains = wire.predicted_gains(HALVES, group.configs("demo", []), Path("benchmarks/results/validation.json"))
    assert list(gains) == list(HALVES.marked) and len(gains) == 5
    ten, seventeen, thirty, fifty = (gains[f"{percent}% of a step"] for percent in (10, 17, 30, 50))
    assert 0.85 < ten < seventeen < 1 < thirty < fifty < 1.25
    assert wire.predicted_gains(HALVES, {}, Path("no result")) == {}


def test_the_set_of_halves(without_hosts: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five wires, each at the rate of its fraction; predictions stand next to measurements."""
    calls: list[tuple[str, int]] = []
    monkeypatch.setattr(wire, "measure", fake(calls, 99))
    monkeypatch.setattr(wire, "predicted_gains", lambda *_: {"17% of a step": 0.95})
    out = tmp_path / "wire-halves"
    assert wire.wire(replace(HALVES, launches=1), "demo", [], [], out) == 0
    facts = read(out.with_suffix(".json"), "wire")
    assert calls == [(name, 0) for name in (NO_LIMIT, *HALVES.marked)] and list(facts["marked"]) == list(HALVES.marked)
    assert sorted(facts["marked"].values(), reverse=True) == list(facts["marked"].values())
    table = next(part for part in wire_report.section(facts).parts if isinstance(part, Table))
    assert [(row[0], row[-1]) for row in table.rows][:3] == [
        (NO_LIMIT, "-"),
        ("10% of a step", "-"),
        ("17% of a step", "0.95"),
    ]
    assert not wire_report.goals(facts)  # halves are predicted to pay nowhere
    (goal,) = wire_report.goals(facts | {"predicted": {"17% of a step": 0.95, "50% of a step": 1.1}})
    assert goal.found.endswith(" x (50% of a step, the worst of 1 wires)") and goal.met is not None
