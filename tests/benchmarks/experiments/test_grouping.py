"""Grouping means fewer GEMMs and collectives with the same bytes; both forms are timed."""

from pathlib import Path

from benchmarks.experiments import grouping
from boost.measure.results import Facts, as_markdown, figures
from tests import toy
from tests.distributed import run_distributed

SHAPE = {"dim": 32, "ffn_dim": 64, "heads": 4, "kv_heads": 4, "layers": 1, "rank": 8, "vocab_size": 64}

COLLECTIVES = {"btp": ((7, 4), (14, 8)), "btp-sp": ((7, 4), (14, 8)), "vanilla": ((9, 6), (21, 12))}
"""(ungrouped, grouped) forward, and forward and backward, as docs of the layouts have them."""


def measured() -> Facts:
    return grouping.measure(toy.toy_config("float32", model=SHAPE), toy.mesh(tp=2), [1], 7)


def test_the_experiment(tmp_path: Path) -> None:
    facts = run_distributed(2, measured)[0]
    for layout in ("btp", "btp-sp", "vanilla"):
        for words in grouping.PASSES:
            apart, together = grouping._pair(facts, layout, 1, words)
            expected = COLLECTIVES[layout][words != "forward"]
            if layout != "vanilla" or words == "forward":
                assert apart["sent_bytes"] == together["sent_bytes"] > 0
            assert (apart["collectives"], together["collectives"]) == expected
            # A of q, k, v and of gate, up: three products less forward, three times as many with the backward pass.
            assert apart["products"] - together["products"] == (3 if words == "forward" else 9)
    text = as_markdown(facts, grouping.section(facts))
    assert (
        "| 1.16x | 2773 / 2395 us |" in text and "| 1.04x | 7577 /" not in text
    )  # the paper's batch 4 was not measured
    (figure,) = figures(grouping.section(facts))
    figure.draw(tmp_path / "grouping.svg")
    assert (tmp_path / "grouping.svg").stat().st_size > 1000
