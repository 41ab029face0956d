"""The experiment times every policy of every layout in one run and reports the measurements."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.experiments import recompute
from boost.config import Config
from tests import toy
from tests.distributed import run_distributed


def make_config(tp: int) -> Config:
    # As wide as it takes for policies to differ, and no wider.
    return toy.toy_config("float32", model={"vocab_size": 64, "layers": 1, "rank": 8}, parallel={"tp": tp})


def run_experiment(config: Config, out: Path) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recompute, "open_mesh", lambda *_: toy.mesh(tp=2))
        patch.setattr(recompute, "close_mesh", lambda: None)
        return recompute.recompute_process(config, [2], 7, out)


@pytest.mark.nightly
def test_the_experiment_leaves_numbers_a_table_and_a_picture(tmp_path: Path) -> None:
    out = tmp_path / "out" / "r"
    assert run_distributed(2, run_experiment, make_config(2), out) == [0, 0]
    facts: dict[str, Any] = json.loads(out.with_suffix(".json").read_text())
    layouts = {row["layout"] for row in facts["rows"]}
    assert layouts == {"btp, online", "btp, sync", "btp-sp", "vanilla", "vanilla, published", "megatron", "megatron-sp"}
    for row in facts["rows"]:
        assert row["kept_bytes"] == row["predicted_bytes"] > 0
        none = next(
            r for r in facts["rows"] if (r["layout"], r["batch"], r["policy"]) == (row["layout"], row["batch"], "none")
        )
        assert (none["kept_bytes"] > row["kept_bytes"]) == (row["policy"] != "none")
        assert len(row["seconds"]) == 7 and min(row["seconds"]) > 0
    for added in recompute.added_times(facts["rows"]):
        low, high = added.added_quartiles_s
        assert low <= added.added_s <= high
        assert (added.against_full_block_interval is None) == (added.policy in ("none", "full-block"))
    table = out.with_suffix(".md").read_text()
    assert table.count("\n| ") == 1 + len(facts["rows"])
    assert "low-rank-sharded" in table
    assert (out.parent / "recompute.svg").read_text().startswith("<?xml")


KEPT = {"none": 1000, "low-rank": 400, "full-block": 100}


def rows_of(kept: dict[str, int], seconds: dict[str, list[float]]) -> list[dict[str, Any]]:
    shared = {"layout": "btp", "batch": 2, "predicted_bytes": 0}
    return [{**shared, "policy": p, "kept_bytes": kept[p], "seconds": each} for p, each in seconds.items()]


def test_rates_are_of_paired_differences() -> None:
    """One of three rounds was slow for all policies, which does not affect the difference to `none` in the same round."""
    seconds = {"none": [1.0, 3.0, 1.0], "low-rank": [1.5, 3.5, 1.5], "full-block": [2.0, 4.0, 2.5]}
    none, low_rank, full = recompute.added_times(rows_of(KEPT, seconds))
    assert (none.added_s, none.saved_bytes, none.against_full_block) == (0, 0, 0)
    assert (low_rank.added_s, low_rank.saved_per_added) == (0.5, 1200)
    assert low_rank.against_full_block == pytest.approx(1200 / 900)
    assert full.against_full_block == 1 and full.against_full_block_interval is None


def test_the_interval_of_memory_saved_per_added_time_is_of_rounds() -> None:
    kept = KEPT
    seconds = {"none": [1.0] * 7, "low-rank": [1.5] * 7, "full-block": [2.0] * 7}
    found = recompute.against_full_block(kept, seconds, "low-rank")  # type: ignore[arg-type]
    assert found is not None and (found.value, found.low, found.high) == pytest.approx((4 / 3, 4 / 3, 4 / 3))
    seconds["low-rank"] = [1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8]
    found = recompute.against_full_block(kept, seconds, "low-rank")  # type: ignore[arg-type]
    assert found is not None and found.low < 4 / 3 < found.high < 4
    seconds["low-rank"] = [0.7, 0.8, 0.9, 1.2, 1.3, 1.4, 1.5]  # often no time is added
    (_, low_rank, _) = recompute.added_times(rows_of(kept, seconds))
    assert low_rank.against_full_block_interval is not None
    assert low_rank.against_full_block_interval[1] is None
    assert "or more" in recompute._ratio_words(low_rank)
    seconds["full-block"] = [0.9] * 7  # nothing can be claimed
    found = recompute.against_full_block(kept, seconds, "low-rank")  # type: ignore[arg-type]
    assert found is not None and (found.value, found.high) == (0, 0)
