"""Bytes match the collective table, times are of the same collectives, and btp-sp sends half the bytes of btp."""

from pathlib import Path

import pytest

from benchmarks.experiments import traffic
from boost.measure.document import Table
from boost.measure.results import Facts, figures
from boost.plan.published import COMMUNICATION
from tests import toy
from tests.distributed import run_distributed

SHAPE = {"dim": 32, "ffn_dim": 64, "heads": 4, "kv_heads": 4, "layers": 1, "rank": 8, "vocab_size": 64}


def measured() -> Facts:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traffic, "LEAST_S", 0.0)
        return traffic.measure(toy.toy_config("float32", model=SHAPE), toy.mesh(tp=2), [1, 2], 7)


def test_the_experiment(tmp_path: Path) -> None:
    facts = run_distributed(2, measured)[0]
    tokens, r, d = 16, 8, 32  # of batch 1; p = 2: an all-reduce sends its payload, the others half of it
    sent = {(row["layout"], row["batch"], row["phase"]): row["sent_bytes"] for row in facts["rows"]}
    assert sent["btp", 1, "backward"] == 4 * tokens * 7 * r
    assert sent["btp", 1, "forward"] == 4 * tokens * (7 * r + 2)  # two statistics
    assert sent["btp-sp", 1, "forward"] * 2 == 4 * tokens * 7 * r == sent["btp-sp", 1, "backward"] * 2
    assert sent["megatron", 1, "forward"] == 4 * tokens * 2 * d == sent["megatron-sp", 1, "forward"]
    assert sent["vanilla", 1, "forward"] == sent["vanilla, published", 1, "forward"] * (8 * d + 3 * 64) // (
        10 * d + 4 * 64
    )
    for row in facts["rows"]:
        assert row["count"] == len(row["collectives"]) > 0
        assert sent[row["layout"], 2, row["phase"]] == 2 * sent[row["layout"], 1, row["phase"]]
        assert (row["step_bytes"] > 0) == (row["layout"] in ("btp-sp", "megatron-sp"))
        assert min(facts["turns"]["seconds"][row["name"]]) > 0
    section = traffic.section(facts)
    (figure,) = figures(section)
    figure.draw(tmp_path / "traffic.svg")
    assert (tmp_path / "traffic.svg").stat().st_size > 1000
    captions = [part.caption for part in section.parts if isinstance(part, Table)]
    assert any("counted" in caption for caption in captions) and any("modeled" in caption for caption in captions)


def test_the_papers_sizes_have_the_papers_volumes() -> None:
    """Payload in units of 2^20 bytes; our btp adds the statistic."""
    found = {(row["size"], row["layout"]): row for row in traffic.modeled()}
    for size, ways in COMMUNICATION.items():
        assert found[size, "megatron"]["payload_bytes"] == ways["full-rank"][0] * 2**20
        over = found[size, "btp"]["payload_bytes"] / 2**20 - ways["BOOST"][0]
        assert 0 < over < 0.01 * ways["BOOST"][0]
        assert found[size, "btp-sp"]["sent_bytes"] == pytest.approx(found[size, "btp"]["sent_bytes"] / 2, rel=0.01)
        assert found[size, "btp-sp"]["seconds"] < found[size, "btp"]["seconds"] < found[size, "vanilla"]["seconds"]
