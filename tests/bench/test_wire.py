"""Steps over two hosts with a limited wire: bytes pass over it, no faster than its rate, and the marked rates are what they say."""

from pathlib import Path

import pytest

from boost.bench import wire
from boost.bench.endtoend import BTP, MEGATRON_SP, VANILLA
from boost.errors import ConfigError, MeasurementError
from boost.measure import hosts
from boost.measure.document import Table
from boost.measure.hosts import Host, two_hosts, why_no_hosts
from boost.measure.results import figures, read

TINY = ["--model.vocab_size=32", "--train.seq_len=16"]


@pytest.fixture
def joined() -> None:
    if reason := why_no_hosts(limited=True):
        pytest.skip(reason)


def test_the_experiment(joined: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "SIZE", (64, 1, 96, 4))
    monkeypatch.setattr(wire, "MIB", (1,))
    monkeypatch.setattr(wire, "marked_rate", lambda *_: 300)  # a tiny step would mark a tiny rate
    monkeypatch.setattr(wire, "CONTENDERS", (MEGATRON_SP, VANILLA, BTP))
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
    assert {row["name"] for row in limited["rows"]} == set(wire.CONTENDERS)
    section = wire.section(facts)
    tables = [part for part in section.parts if isinstance(part, Table)]
    assert len(tables[0].rows) == len(set(rates)) * len(wire.CONTENDERS)
    assert [figure.name for figure in figures(section)] == ["wire"]


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
    with pytest.raises(ConfigError, match=r"^boost bench wire needs two network namespaces: .* this is darwin$"):
        wire.wire("demo", [], [], 1, 7, Path("x"))
