"""Factorized and healed models: what is finished is not made twice, and the tables say what the numbers say."""

import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.experiments import healing, healing_report
from benchmarks.experiments.healing import HealingExperiment, measure
from boost.config import Config
from boost.errors import ConfigError
from boost.measure.document import Table
from boost.measure.results import read
from tests import toy


@pytest.fixture
def config(store: Path, tmp_path: Path) -> Config:
    return toy.toy_config(
        "float32",
        model={"family": "dense", "vocab_size": 300, "heads": 4, "kv_heads": 4},
        train={"steps": 4, "seq_len": 32, "global_batch": 4, "micro_batch": 4, "eval_every": 0},
        optim={"warmup_steps": 1},
        data={"store": str(store)},
        run={"dir": str(tmp_path / "run"), "device": "cpu"},
    )


def plan(tmp_path: Path, **changes: Any) -> HealingExperiment:
    return HealingExperiment(**{"seeds": (0, 1), "budgets": (0.6,), "heal": 0.5, "heal_lrs": (1e-3,), "tokens": 512,
                                "work": tmp_path / "work", **changes})  # fmt: skip


def test_what_is_finished_is_kept(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With numbers that are made up: plain SVD rises by 1, the whole method by a tenth; text alone does not heal."""
    made: list[Any] = []

    def factorize(
        dense: Path, out: Path, config: Config, plan: HealingExperiment, key: dict[str, Any]
    ) -> dict[str, Any]:
        made.append(key)
        out.mkdir(parents=True)
        rise = {"plain": 1.0, "all": 0.1}.get(key["start"], 0.5)
        return {"loss": math.log(10 + rise), "parameters": 1000} | ({"report": {}} if key["start"] == "all" else {})

    def heal(config: Config, plan: HealingExperiment, key: dict[str, Any], source: Path, run: Path) -> dict[str, Any]:
        made.append(key)
        run.mkdir(parents=True)
        return {"loss": math.log(10.1 if key["weight"] else 11), "tokens": 100}

    def train(config: Config, start: Path | None = None) -> dict[str, Any]:
        made.append(config.train.seed)
        Path(config.run.dir).mkdir(parents=True)
        return {"loss": math.log(10), "tokens": 1000}

    for function in (factorize, heal, train):
        monkeypatch.setattr(healing, function.__name__, function)
    monkeypatch.setattr(healing_report, "draw", lambda *_: None)
    out = tmp_path / "healing"
    assert measure(config, plan(tmp_path, seeds=(0,)), out) == 0
    once = len(made)
    assert measure(config, plan(tmp_path), out) == 0
    assert once < len(made) < 2 * once, "the second seed has fewer contenders, and the first is not repeated"
    facts = read(out.with_suffix(".json"), "healing")
    assert healing_report.rises(facts, 0.6, "all") == pytest.approx({0: 0.1, 1: 0.1})
    _, starts, heals, _ = healing_report.section(facts).parts
    assert isinstance(starts, Table) and isinstance(heals, Table)
    whole = next(row for row in starts.rows if row[1] == healing_report.STARTS["all"])
    assert whole[4] == "0.100 ± 0.000"
    assert {row[4].split()[0] for row in heals.rows if row[2] != "0 (text only)"} == {"+1.00"}
    assert {row[4].split()[0] for row in heals.rows if row[2] == "0 (text only)"} == {"+10.00"}
    rates = {row["start"]: row["lr"] for row in facts["rows"] if row["kind"] == "heal"}
    assert rates == {"plain": 1e-3, "all": 1e-3, "cola": 3.33e-5}, "cola heals at a lower rate"
    with pytest.raises(ConfigError, match=r"results with other settings: plan.heal is \[?.* there"):
        measure(config, plan(tmp_path, heal=0.25), out)


@pytest.mark.nightly
def test_the_experiment_leaves_numbers_and_a_picture(config: Config, tmp_path: Path) -> None:
    out = tmp_path / "healing"
    assert measure(config, plan(tmp_path, seeds=(0,)), out) == 0
    facts = read(out.with_suffix(".json"), "healing")
    kinds = [row["kind"] for row in facts["rows"]]
    assert (kinds.count("dense"), kinds.count("start"), kinds.count("heal")) == (1, 6, 5)
    assert all(0 < row["loss"] < 10 for row in facts["rows"])
    assert (tmp_path / "healing.svg").stat().st_size > 1000
    assert "Measured before training" in out.with_suffix(".md").read_text()
