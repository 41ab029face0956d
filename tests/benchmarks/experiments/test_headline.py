"""The first screen: its numbers and its figure come from results."""

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.experiments import headline
from benchmarks.experiments.document import Goal
from benchmarks.experiments.results import Facts
from benchmarks.experiments.steps import BTP, BTP_SP, MEGATRON_SP, PUBLISHED, VANILLA

ENVIRONMENT = {"gpus": [], "cpu": "Slow CPU", "cores": 2}
FOUND = "2.21 (2.15 to 2.25) x (btp-sp, halves)"


def launch(mbit: float | None, seconds: Any, **more: Any) -> Facts:
    names = (MEGATRON_SP, VANILLA, PUBLISHED, BTP, f"{BTP}, halves", BTP_SP)
    return {"mbit": mbit, "rows": [{"name": name, "seconds": seconds} for name in names], **more}


def wire(*groups: Facts, **more: Any) -> Facts:
    marked = {"share-matched": 2000, "slow": 400}
    return {"experiment": "wire", "environment": ENVIRONMENT, "marked": marked, "groups": list(groups), **more}


GROUPS = (launch(None, [1.0, 1.1]), launch(2000, [1.2, 1.3]), launch(400, [2.0, 2.1]))


def test_numbers_are_those_of_the_goals() -> None:
    what = "share-matched wire: best low-rank layout against published vanilla"
    goals = [Goal(what, ">= 2.3x", "d 1024", FOUND, False)]
    counted = [Goal("btp-sp against btp, bytes", "0.50x", "d 512, more", "0.498 x", True, "counted")]
    worst = {"float32": {"cola": {"btp": 3e-7, "btp-sp": 4.5e-6}}}
    curves = {"experiment": "curves", "worst_relative_difference": worst, "config": {"train": {"steps": 50}}}
    found = headline.numbers([(wire(*GROUPS), goals), ({"experiment": "steps"}, counted), (curves, [])])
    values = [each.value for each in found]
    assert values == ["2.21x", headline.NOT_MEASURED, headline.NOT_MEASURED, "0.50x", "4.5 x 10^-6"]
    assert [each.kind for each in found] == ["measured", "", "", "counted", "measured"]
    assert found[0].interval == "2.15 to 2.25" and "btp-sp, overlapped" in found[0].where and "2.27x" in found[0].where
    assert "d 512" in found[3].where and "2 layouts over 50 steps" in found[4].where
    assert [each.value for each in headline.numbers([])] == [headline.NOT_MEASURED] * 5


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize(
    "facts",
    [
        wire(*GROUPS),
        wire(*(launch(g["mbit"], [[1.0, 1.1], [1.2, 1.3]]) for g in GROUPS)),  # by launch
        wire(*(g | {"group": "d 1024", "wire": w} for g, w in zip(GROUPS, ("no limit", "share-matched", "slow"), strict=True)),
             launch(7, [9.0, 9.0], group="other", wire="slow"), marked={}),
        wire(*GROUPS[1:]),  # nothing without a limit
    ],
    ids=["flat", "launches", "groups", "limited"],
)  # fmt: skip
def test_the_figure_has_every_line_and_both_marks(facts: Facts, narrow: bool, tmp_path: Path) -> None:
    headline.draw(facts, tmp_path / "a.svg", narrow)
    said = re.findall(r"<text[^>]*>([^<]+)</text>", (tmp_path / "a.svg").read_text(encoding="utf-8"))
    words = " ".join(said)
    for label in ("vanilla, strong", "full rank", "btp", "btp-sp", "share-matched", "slow wire", "2,000", "400"):
        assert label in words
    assert "9.00" not in words and ("no limit" in words) == any(g["mbit"] is None for g in facts["groups"])
    assert narrow or "2.05 s" in words or "1.15 s" in words


def test_the_fastest_form_counts() -> None:
    rows = [{"name": BTP, "seconds": [2.0] * 3}, {"name": f"{BTP}, halves", "seconds": [[1.0, 1.0], [3.0, 1.0]]}]
    facts = wire({"mbit": 400, "rows": rows})
    found = headline._fastest(facts, 400, (BTP,))
    assert found is not None and found.median == 1.0 and found.rounds == 4
    assert headline._fastest(facts, 400, (VANILLA,)) is None and headline._fastest(facts, 7, (BTP,)) is None


def test_only_a_result_with_the_published_baseline_has_the_figure() -> None:
    other = wire(launch(400, [1.0, 1.0]), set="meshes")
    assert headline.wire_of([other, {"experiment": "steps"}]) is None
    assert headline.wire_of([other, facts := wire(*GROUPS)]) is facts


def test_where_it_was_measured_and_what_is_modeled() -> None:
    assert "Slow CPU, 2 cores" in headline.measured_words([wire(*GROUPS)])
    assert headline.measured_words([]) == headline.NOT_MEASURED
    rows = [
        {"half": "held out", "predicted_s": 1.1, "measured_s": 1.0},
        {"half": "fitted", "predicted_s": 9.0, "measured_s": 1.0},
    ]
    record = {"experiment": "record", "rows": rows}
    assert "on 1 held-out published runs of others is 10.0%" in headline.modeled_words([record])
    assert "error" not in headline.modeled_words([])
