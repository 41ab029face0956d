"""The experiment times every policy of every layout in one run, and its table says what was measured."""

import json
from pathlib import Path
from typing import Any

import pytest

from boost.bench import recompute
from boost.config import Config
from boost.errors import ConfigError
from tests import toy
from tests.distributed import run_distributed


def make_config(tp: int) -> Config:
    # As wide as it takes for policies to differ, and no wider.
    return toy.toy_config("float32", model={"vocab_size": 64, "layers": 1, "rank": 8}, parallel={"tp": tp})


def run_experiment(config: Config, out: Path) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recompute, "open_mesh", lambda *_: toy.mesh(tp=2))
        patch.setattr(recompute, "close_mesh", lambda: None)
        return recompute.recompute_process(config, [2], 2, out)


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
        assert row["saved_bytes"] == none["kept_bytes"] - row["kept_bytes"]
        assert (row["saved_bytes"] > 0) == (row["policy"] != "none")
        low, high = row["added_quartiles_s"]
        assert low <= row["added_s"] <= high
    table = out.with_suffix(".md").read_text()
    assert table.count("\n| ") == 1 + len(facts["rows"])
    assert "low-rank-sharded" in table
    assert out.with_suffix(".svg").read_text().startswith("<?xml")


def test_rates_are_of_paired_differences() -> None:
    """Of three rounds, one was slow for all policies: the difference to none in the same round does not see it."""
    config = make_config(2)
    kept = {"none": 1000, "low-rank": 400, "full-block": 100}
    seconds = {"none": [1.0, 3.0, 1.0], "low-rank": [1.5, 3.5, 1.5], "full-block": [2.0, 4.0, 2.5]}
    none, low_rank, full = recompute._rows("btp", config, kept, seconds)  # type: ignore[arg-type]
    assert (none.added_s, none.saved_bytes, none.against_full_block) == (0, 0, 0)
    assert (low_rank.added_s, low_rank.saved_per_added) == (0.5, 1200)
    assert low_rank.against_full_block == pytest.approx(1200 / 900)
    assert full.against_full_block == 1


def test_one_process_has_one_layout() -> None:
    assert [name for name, _ in recompute.variants(make_config(1), [1, 2])] == ["single"] * 2 + ["single, dense"] * 2


def test_a_cut_that_is_not_legal_is_refused_before_anything_starts() -> None:
    config = make_config(2)
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update={"tp": 16})})
    with pytest.raises(ConfigError, match=r"parallel.tp = 16 must divide model.heads = 8"):
        list(recompute.variants(config, [1]))
