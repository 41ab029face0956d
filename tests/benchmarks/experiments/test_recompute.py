"""Memory saved per added time: of paired rounds, with an interval."""

from typing import Any

import pytest

from benchmarks.experiments import recompute

KEPT = {"none": 1000, "low-rank": 400, "full-block": 100}


def rows_of(kept: dict[str, int], seconds: dict[str, list[float]]) -> list[dict[str, Any]]:
    shared = {"layout": "btp", "batch": 2, "predicted_bytes": 0}
    return [{**shared, "policy": p, "kept_bytes": kept[p], "seconds": each} for p, each in seconds.items()]


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
