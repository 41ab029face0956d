"""The GEMMs of every layout are timed at every TP, and utilization is FLOP/s relative to the ceiling of the same round."""

import json
from pathlib import Path

import pytest

from benchmarks.experiments import blocks, gemms
from benchmarks.experiments.blocks_report import row_of
from boost.measure.results import Facts
from tests import toy

SHAPE = {"dim": 32, "ffn_dim": 64, "heads": 4, "kv_heads": 4, "layers": 1, "rank": 8, "vocab_size": 64}


def test_the_experiment_leaves_numbers_a_table_and_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemms, "LEAST_S", 0.0)
    monkeypatch.setattr(blocks, "close_mesh", lambda: None)
    config, out = toy.toy_config("float32", model=SHAPE, run={"device": "cpu"}), tmp_path / "gemms"
    work = (gemms.measure, ([1, 4], 2, (16, 32), 7), gemms.section, config, out)
    assert blocks.experiment_process(*work) == 0
    facts: Facts = json.loads(out.with_suffix(".json").read_text())
    assert {(row["tp"], row["layout"]) for row in facts["rows"]} == {
        (1, "dense"), (1, "low-rank"), (4, "megatron"), (4, "vanilla"), (4, "btp"), (4, "btp-sp"),
    }  # fmt: skip
    for row in facts["rows"]:
        products = [(product["count"], product["a"]["shape"], product["b"]["shape"]) for product in row["products"]]
        assert row["flops"] == sum(2 * n * a[0] * a[1] * b[1] for n, a, b in products) > 0
        assert len(facts["turns"]["seconds"][row["name"]]) == 7
        if row["tp"] > 1:  # a process's share
            whole = "dense" if row["layout"] == "megatron" else "low-rank"
            alone = row_of(facts, layout=whole, tp=1, what=row["what"], phase=row["phase"])
            assert row["flops"] * row["tp"] == alone["flops"]
    table = out.with_suffix(".md").read_text()
    assert "[32, 32] x [32, 2]" in table and "[32, 8] x [8, 8]" in table  # r/p against r
    assert "time, vanilla / btp, MLP" in table and "1.21x" in table
    assert out.with_suffix(".svg").read_text().startswith("<?xml")
    assert gemms.goals(facts) == []


def test_utilization_is_of_the_faster_square_in_the_same_round() -> None:
    """The machine is twice as slow in every second round; a contender at a quarter of its speed stays at a quarter in all."""
    slow = [1.0, 2.0] * 3 + [1.0]
    seconds = {"square 10": [s * 2e3 / 100 for s in slow], "square 20": [s * 16e3 / 400 for s in slow]}
    seconds["mine"] = [s * 800 / 100 for s in slow]
    facts = {"squares": [10, 20], "turns": {"seconds": seconds}}
    assert gemms.ceiling(facts)[0] == 20
    found = gemms.utilization(facts, {"flops": 800, "name": "mine"})
    assert (found.value, found.low, found.high) == pytest.approx((0.25, 0.25, 0.25))
