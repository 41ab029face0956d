"""The bound is the t interval of differences paired by seed; tables say what the numbers say."""

from typing import Any

import pytest

from benchmarks.experiments.perplexity_report import bound, rows
from benchmarks.experiments.scores import SCORES
from tests import toy

SEEDS = [0, 1, 2, 3, 4]
ALONE = [10.0, 12.0, 14.0, 16.0, 18.0]
APART = [0.01, -0.02, 0.03, 0.0, 0.03]
"""Differences of the layout: mean 0.01, sum of squares about the mean 0.0018."""


def made_up(scale: float = 1.0) -> dict[str, Any]:
    def run(layout: str, dtype: str, seed: int) -> dict[str, Any]:
        apart = scale * APART[seed] if layout == "btp" else 0.0
        answers = "0123" if layout == "btp" and seed == 0 else "0120"
        return {
            "family": "cola", "layout": layout, "dtype": dtype, "seed": seed, "losses": [3.0, 2.0 + seed],
            "perplexity": ALONE[seed] + apart * (30 if dtype == "bfloat16" else 1),
            "scores": dict.fromkeys(SCORES, 0.2 * seed) if dtype == "float32" else None,
            "answers": answers if dtype == "float32" else None,
        }  # fmt: skip

    runs = [
        run(layout, dtype, seed)
        for layout in ("btp", "single")
        for dtype, seeds in (("float32", SEEDS), ("bfloat16", SEEDS[:3]))
        for seed in seeds
    ]
    return {
        "config": toy.toy_config(parallel={"tp": 2}, train={"steps": 4}).model_dump(),
        "families": ["cola"], "dtypes": ["float32", "bfloat16"], "seeds": SEEDS, "few_seeds": [0, 1, 2],
        "kept_steps": [2, 4], "limits": {"float32": 0.1, "bfloat16": 0.5}, "settings": {"questions": 2}, "runs": runs,
    }  # fmt: skip


def test_the_bound_by_hand() -> None:
    """Five differences: 2.776 is the 97.5 % quantile of t with 4 degrees of freedom; two: 12.706, with one."""
    deviation = (0.0018 / 4) ** 0.5
    assert bound(APART) == pytest.approx(0.01 + 2.7764 * deviation / 5**0.5, rel=1e-4)
    assert bound([-each for each in APART]) == pytest.approx(bound(APART))
    assert bound([1.0, 3.0]) == pytest.approx(2 + 12.706 * 2**0.5 / 2**0.5, rel=1e-4)
    assert bound([0.0, 0.0, 0.0]) == 0


def test_rows_are_paired_by_seed_and_relative_to_the_spread_of_one_process() -> None:
    single, btp, few_single, few = rows(made_up())
    assert [row.layout for row in (single, btp, few_single, few)] == ["single", "btp", "single", "btp"]
    assert single.perplexity == pytest.approx((14, 10**0.5)) and single.loss == pytest.approx((4, 2.5**0.5))
    assert (single.worst, single.bound) == (0, 0)
    assert btp.worst == pytest.approx(0.03) and btp.bound == pytest.approx(bound(APART))
    assert btp.share == pytest.approx(bound(APART) / 10**0.5) and btp.holds
    assert (btp.changed, btp.questions) == (pytest.approx(0.2), 4) and btp.accuracy == pytest.approx((40, 40, 40))
    assert few.worst == pytest.approx(0.9) and few.share == pytest.approx(30 * bound(APART[:3]) / 10**0.5)
    assert few.accuracy == () and not few.holds, "three seeds of bfloat16"
