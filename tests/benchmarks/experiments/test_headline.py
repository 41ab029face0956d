"""The first screen: its numbers and its figure come from results."""

from typing import Any

from benchmarks.experiments import headline
from benchmarks.experiments.results import Facts, Goal
from benchmarks.experiments.steps import BTP, BTP_SP, MEGATRON_SP, PUBLISHED, VANILLA

ENVIRONMENT = {"gpus": [], "cpu": "Slow CPU", "cores": 2}
FOUND = "2.21 (2.15 to 2.25) x (btp-sp, halves)"


def launch(wire: str, mbit: float | None, seconds: dict[str, Any]) -> Facts:
    rows = [{"name": name, "seconds": found} for name, found in seconds.items()]
    return {"group": "TP 2", "wire": wire, "mbit": mbit, "rows": rows}


def result(*launches: Facts) -> Facts:
    return {"experiment": "wire", "set": "main", "environment": ENVIRONMENT, "groups": list(launches)}


def test_numbers_are_those_of_the_goals() -> None:
    what = "share-matched wire: best low-rank layout against published vanilla"
    goals = [Goal(what, ">= 2.3x", "d 1024", FOUND, False)]
    counted = [Goal("btp-sp against btp, bytes", "0.50x", "d 512, more", "0.498 x", True, "counted")]
    worst = {"float32": {"cola": {"btp": 3e-7, "btp-sp": 4.5e-6}}}
    curves = {"experiment": "curves", "worst_relative_difference": worst, "config": {"train": {"steps": 50}}}
    names = (MEGATRON_SP, VANILLA, PUBLISHED, BTP, f"{BTP}, halves", BTP_SP)
    launches = [
        launch(wire, mbit, dict.fromkeys(names, seconds))
        for wire, mbit, seconds in (
            ("no limit", None, [1.0, 1.1]),
            ("share-matched", 2000, [1.2, 1.3]),
            ("slow", 400, [2.0, 2.1]),
        )
    ]
    found = headline.numbers([(result(*launches), goals), ({"experiment": "steps"}, counted), (curves, [])])
    values = [each.value for each in found]
    assert values == ["2.21x", headline.NOT_MEASURED, headline.NOT_MEASURED, "0.50x", "4.5 x 10^-6"]
    assert [each.kind for each in found] == ["measured", "", "", "counted", "measured"]
    assert found[0].interval == "2.15 to 2.25" and "btp-sp, overlapped" in found[0].where and "2.27x" in found[0].where
    assert "d 512" in found[3].where and "2 layouts over 50 steps" in found[4].where
    assert [each.value for each in headline.numbers([])] == [headline.NOT_MEASURED] * 5
