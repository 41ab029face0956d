"""Steps over two hosts with a rate-limited wire: bytes pass over it no faster than its rate, and the marked rates are correct."""

from pathlib import Path

import pytest

from benchmarks.experiments import hosts, wire
from benchmarks.experiments.endtoend import BTP, BTP_SP, MEGATRON_SP
from benchmarks.experiments.goals import target_of
from benchmarks.experiments.hosts import Host, two_hosts, why_no_hosts
from boost.cli.main import main
from boost.errors import ConfigError, MeasurementError
from boost.measure.document import Table
from boost.measure.results import Facts, figures, read

TINY = ["--model.vocab_size=32", "--train.seq_len=16"]


@pytest.fixture
def joined() -> None:
    if reason := why_no_hosts(limited=True):
        pytest.skip(reason)


@pytest.mark.nightly
def test_the_experiment(joined: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "SIZE", (64, 1, 96, 4))
    monkeypatch.setattr(wire, "MIB", (1,))
    monkeypatch.setattr(wire, "marked_rate", lambda *_: 300)  # a tiny step would mark a tiny rate
    names = ((MEGATRON_SP, "none"), (BTP, "none"), (BTP, "halves"))
    monkeypatch.setattr(wire, "CONTENDERS", names)
    out = tmp_path / "wire"
    assert wire.wire("demo", TINY, [], 1, 7, out) == 0
    facts = read(out.with_suffix(".json"), "wire")
    rates = [group["mbit"] for group in facts["groups"]]
    assert rates == [None, 300] and facts["marked"] == {"share-matched": 300, "slow": 300}
    limited = next(group for group in facts["groups"] if group["mbit"] == 300)
    for name in ("all-gather", "reduce-scatter", "all-to-all"):
        assert min(limited["collectives"][f"{name}, 1 MiB"]) > 0.8 * 2**19 * 8 / 300e6, (
            "half of it crosses, at 300 Mbit/s"
        )
    assert min(limited["collectives"]["all-reduce, 1 MiB"]) > 0.8 * 2**20 * 8 / 300e6
    assert {row["name"] for row in limited["rows"]} == {MEGATRON_SP, BTP, f"{BTP}, halves"}
    section = wire.section(facts)
    tables = [part for part in section.parts if isinstance(part, Table)]
    assert len(tables[0].rows) == len(set(rates)) * len(wire.CONTENDERS)
    assert [row[1] for row in tables[1].rows] == [BTP]
    (recorded,) = [group["timelines"] for group in facts["groups"] if group["timelines"]]
    assert [[step["rank"] for step in steps] for steps in recorded.values()] == [[0, 1]] * 2
    assert [row[:2] for row in tables[-1].rows] == [(name, rank) for name in (BTP, f"{BTP}, halves") for rank in "01"]
    assert [figure.name for figure in figures(section)] == ["wire", "wire-timeline"]
    for figure in figures(section):
        figure.draw(tmp_path / f"{figure.name}.svg")
        assert (tmp_path / f"{figure.name}.svg").stat().st_size > 1000


def made_up(seconds: dict[str, float]) -> Facts:
    """A synthetic result of seven rounds: a limit of 100 Mbit/s adds 1 s to every step, and 0.5 s with overlapped halves."""
    groups = []
    for mbit in (None, 100.0):
        rows = [
            {
                "name": name,
                "seconds": [(s + (0.5 if "halves" in name else 1.0) * bool(mbit)) * (1 + n / 1e3) for n in range(7)],
            }
            for name, s in seconds.items()
        ]
        groups.append({"mbit": mbit, "rows": rows, "cores": 2, "threads": 1, "parallel": "", "name": "wire"})
    return {"groups": groups, "marked": {"share-matched": 100.0, "slow": 100.0}, "rounds": 7, "launches": 1}


def test_goals_are_read_at_the_worse_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "shape_of", lambda group: "made up")
    seconds = {wire.name_of(*each): 2.0 if each[0] in (BTP, BTP_SP) else 3.0 for each in wire.CONTENDERS}
    found = {goal.what: goal for goal in wire.goals(made_up(seconds))}
    assert all(target_of(what).experiment == "wire" for what in found)
    assert found["communication of TP hidden"].met is False  # half of what the wire adds
    assert found["communication of TP hidden"].found.startswith("megatron 0.5")
    assert found["share-matched wire: best low-rank layout against strong vanilla"].found.startswith(
        "1.60 (1.60 to 1.60) x (btp, online, halves)"
    )
    assert found["slow wire: btp-sp against btp"].found.startswith("1.00")


def test_steps_of_many_tokens_have_goals_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses the faster form of each layout; the limit adds 1 s to steps of 2 s and 3 s, and 0.5 s with halves."""
    monkeypatch.setattr(wire, "shape_of", lambda group: "made up")
    seconds = {BTP: 4.0, BTP_SP: 3.0, f"{BTP_SP}, halves": 3.0, wire.BTP_CP: 2.0, f"{wire.BTP_CP}, halves": 2.0}
    found = wire.goals(made_up(seconds))
    assert [target_of(goal.what).experiment for goal in found] == ["wire", "wire"]
    assert [goal.met for goal in found] == [True, True]
    assert found[1].found == "1.40 (1.40 to 1.40) x (btp-cp, halves against btp-sp, halves)"


def test_only_known_layouts_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "wire", "--layouts", "btp-sq"]) == 2
    assert "--layouts = btp-sq is not supported; use one of" in capsys.readouterr().err


def test_the_marked_rate_is_that_of_its_share() -> None:
    free = {"rows": [{"name": BTP, "seconds": [1.5] * 7, "sent_bytes": 10**8}]}
    for fraction in (0.17, 0.5):
        on_the_wire = 8e8 / (1e6 * wire.marked_rate(free, fraction))
        assert on_the_wire / (on_the_wire + 1.5) == pytest.approx(fraction, rel=1e-2)


def test_hosts_are_told_apart_and_a_limit_can_be_lifted(joined: None) -> None:
    with two_hosts() as (first, second):
        for host in (first, second):
            host.limit(100)
            host.limit(None)
            assert host.received() >= 0
        assert first.address != second.address
    with pytest.raises(MeasurementError, match="exit code"):
        wire.measure((Host("no-such", "x", "1"), Host("no-such", "x", "2")), None, {}, 7)


def test_without_namespaces_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts.sys, "platform", "darwin")
    monkeypatch.setattr(wire, "why_no_hosts", why_no_hosts.__wrapped__)
    with pytest.raises(ConfigError, match=r"^the wire experiment needs two network namespaces: .* this is darwin$"):
        wire.wire("demo", [], [], 1, 7, Path("x"))
