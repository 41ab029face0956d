"""The families experiment: same tokens for all, a learning rate for each, and results that are never mixed or repeated."""

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.experiments import families, families_report
from benchmarks.experiments.families import FamilyExperiment, FamilyRun, Task
from benchmarks.experiments.scores import SCORES
from boost.config import Config
from boost.config.architecture import parameter_count
from boost.errors import ConfigError, TrainingError
from tests import toy

FOUR = ("dense", "svd", "cola", "lax")
PLAN = FamilyExperiment(FOUR, seeds=(0, 1), sweep=(1e-3, 1e-2), sweep_seed=9, sweep_steps=2, rounds=4, jobs=1)


@pytest.fixture
def config(store: Path, tmp_path: Path) -> Config:
    return toy.toy_config(
        "float32",
        model={"vocab_size": 300, "layers": 2},
        optim={"warmup_steps": 2},
        train={"steps": 4, "seq_len": 32, "eval_every": 1, "eval_tokens": 64, "global_batch": 8, "micro_batch": 8},
        data={"store": str(store)},
        run={"dir": str(tmp_path / "run"), "device": "cpu"},
    )


def made_up(task: Task) -> FamilyRun:
    """A synthetic run: its loss falls with the learning rate, but dense diverges at 1e-2."""
    place = FOUR.index(task.contender)
    loss = None if (task.contender, task.lr) == ("dense", 1e-2) else 5 - place / 4 - 10 * task.lr + task.seed / 8
    return FamilyRun(
        task.contender, task.seed, task.lr, [6.0, 5.0], [(1, 5.5)], loss, None if loss is None else 2.0, 1.0, None
    )


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Task]:
    """Replaces runs with synthetic ones in this process and records them."""
    tasks: list[Task] = []

    def each(waiting: Sequence[Task], jobs: int) -> Iterator[FamilyRun]:
        for task in waiting:
            tasks.append(task)
            yield made_up(task)

    monkeypatch.setattr(families, "each_trained", each)
    timed = {"usual": [0.2, 0.1, 0.4, 0.3], "exact": []}
    monkeypatch.setattr(families, "time_steps", lambda configs, rounds: dict.fromkeys(configs, timed))
    monkeypatch.setattr(families_report, "draw", lambda facts, path: None)
    return tasks


def names(tasks: Sequence[Task]) -> list[tuple[str, int, float]]:
    return [(task.contender, task.seed, task.lr) for task in tasks]


def test_seeds_are_interleaved_and_rates_chosen_on_another_seed(
    config: Config, made: list[Task], tmp_path: Path
) -> None:
    assert families.compare(config, PLAN, tmp_path / "f") == 0
    assert names(made[:8]) == [(name, 9, lr) for lr in (1e-3, 1e-2) for name in FOUR]
    rate = {name: 1e-3 if name == "dense" else 1e-2 for name in FOUR}
    order = [(name, 0) for name in FOUR] + [(name, 1) for name in ("svd", "cola", "lax", "dense")]
    assert names(made[8:]) == [(name, seed, rate[name]) for name, seed in order]
    for task in made:
        steps = 2 if task.seed == 9 else 4
        assert (task.config.train.seed, task.config.train.steps, task.config.optim.lr) == (task.seed, steps, task.lr)
        assert task.config.optim.warmup_steps == steps // 2, "the same share of a shorter run"


def test_contenders_differ_in_what_they_say_and_nothing_else(config: Config) -> None:
    each = {
        name: families.configuration(config, name, 1, 0.5, 2)
        for name, contender in families.CONTENDERS.items()
        if not contender.optim
    }
    for name, one in each.items():
        assert (one.train, one.data, one.optim) == (each["dense"].train, each["dense"].data, each["dense"].optim)
        for field in ("vocab_size", "dim", "ffn_dim", "layers", "heads", "kv_heads", "mlp_silu", "init_std"):
            assert getattr(one.model, field) == getattr(config.model, field), name
        assert one.model.rank == (None if name == "dense" else 8)
    kinds = {
        name: (c.model.family, c.model.over, c.model.gate, c.model.latent_act, c.model.factor_init)
        for name, c in each.items()
    }
    assert kinds == {
        "dense": ("dense", "none", "none", "none", "none"),
        "svd": ("svd", "none", "none", "none", "xavier"),
        "cola": ("cola", "none", "none", "silu", "cola"),
        "lax": ("lax", "cola", "identity", "silu", "cola"),
        "svd-spectral": ("svd", "none", "none", "none", "spectral"),
        "lax-svd": ("lax", "svd", "identity", "none", "xavier"),
        "lax-tensor": ("lax", "cola", "tensor", "silu", "cola"),
        "lax-dense": ("lax", "cola", "dense", "silu", "cola"),
        "cola-kv": ("cola", "none", "none", "silu", "cola"),
    }
    assert {name: one.model.ranks for name, one in each.items() if one.model.ranks} == {
        "cola-kv": {"attn.k": 4, "attn.v": 4}
    }
    counts = {name: parameter_count(one.model) for name, one in each.items()}
    assert counts["cola"] > counts["cola-kv"]
    assert counts["svd"] == counts["cola"] < counts["lax"] < counts["lax-tensor"] < counts["lax-dense"]


def test_the_numbers_of_the_table(config: Config, made: list[Task], tmp_path: Path) -> None:
    families.compare(config, PLAN, tmp_path / "f")
    facts: dict[str, Any] = json.loads((tmp_path / "f.json").read_text())
    assert facts["complete"] and [row["loss"] for row in facts["sweep"]].count(None) == 1
    rows = {row["contender"]: row for row in families_report.rows(facts)}
    assert list(rows) == list(FOUR)
    low, high = 5 - 2 / 4 - 0.1, 5 - 2 / 4 - 0.1 + 1 / 8
    half_apart = (high - low) / math.sqrt(2)
    assert rows["cola"]["loss"] == pytest.approx(((low + high) / 2, half_apart))
    middle = (math.exp(low) + math.exp(high)) / 2
    assert rows["cola"]["perplexity"] == pytest.approx((middle, (math.exp(high) - math.exp(low)) / math.sqrt(2)))
    assert rows["cola"]["paired"] == pytest.approx((-2 / 4 - 0.1 + 0.01, 0.0), abs=1e-9), (
        "the seeds' own differences cancel"
    )
    assert rows["dense"]["paired"] is None
    assert rows["lax"]["step_s"] == pytest.approx((0.25, 0.175, 0.325))
    assert rows["lax"]["at_edge"] and rows["dense"]["at_edge"]
    table = (tmp_path / "f.md").read_text()
    assert table.count("\n| ") == (1 + len(FOUR)) + (1 + len(FOUR) - 1), "the models, and their differences"
    assert "| lax - cola |" in table
    assert "| 4.4625 ± 0.0884 |" in table and "| -0.5900 ± 0.0000 |" in table and "| 0.01 * |" in table


def test_a_run_that_diverged_is_said_and_not_averaged_away(config: Config, made: list[Task], tmp_path: Path) -> None:
    hot = config.model_copy(update={"optim": config.optim.model_copy(update={"lr": 1e-2})})
    families.compare(hot, dataclasses.replace(PLAN, sweep=()), tmp_path / "f")
    rows = {row["contender"]: row for row in families_report.rows(json.loads((tmp_path / "f.json").read_text()))}
    assert rows["dense"]["diverged"] == 2 and rows["dense"]["loss"] is None and rows["svd"]["paired"] is None
    assert not rows["svd"]["at_edge"]
    assert "diverged, 2 of 2" in (tmp_path / "f.md").read_text()
    with pytest.raises(TrainingError, match="dense diverged at every learning rate"):
        families.compare(hot, dataclasses.replace(PLAN, sweep=(1e-2,)), tmp_path / "g")


def facts_of_losses(losses: dict[str, list[float | None]]) -> dict[str, Any]:
    runs = [
        {"contender": name, "seed": seed, "lr": 1.0, "loss": loss}
        for name, each in losses.items()
        for seed, loss in enumerate(each)
    ]
    seeds = list(range(len(next(iter(losses.values())))))
    return {"contenders": {name: {"lr": 1.0} for name in losses}, "seeds": seeds, "runs": runs}


def test_variants_are_compared_with_what_they_vary_by_seed() -> None:
    losses = {"dense": [5.0, 7.0, 6.0], "cola": [4.0, 6.5, 5.5], "cola-kv": [4.1, 6.6, 5.6], "loro": [5.0, None, 6.0]}
    found = families_report.differences(facts_of_losses(losses))
    assert list(found) == [("cola", "dense"), ("cola-kv", "cola"), ("loro", "dense")], "no svd here"
    half = 4.302653 * 0.288675 / math.sqrt(3)
    assert found["cola", "dense"] == [pytest.approx((-2 / 3, -2 / 3 - half, -2 / 3 + half), abs=1e-5)]
    assert found["cola-kv", "cola"] == [pytest.approx((0.1, 0.1, 0.1))]
    assert found["loro", "dense"] == [None]
    losses = {"dense": [None, None], "cola": [None, None]}
    assert families_report.differences(facts_of_losses(losses)) == {("cola", "dense"): [None]}, "all runs diverged"


def test_what_is_finished_is_kept_and_other_settings_are_refused(
    config: Config, made: list[Task], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "f"

    def stops_after(count: int) -> None:
        def each(waiting: Sequence[Task], jobs: int) -> Iterator[FamilyRun]:
            for task in waiting[:count]:
                made.append(task)
                yield made_up(task)
            if len(waiting) > count:
                raise KeyboardInterrupt

        monkeypatch.setattr(families, "each_trained", each)

    stops_after(5)
    for _ in range(2):  # in the sweep, then in the runs
        with pytest.raises(KeyboardInterrupt):
            families.compare(config, PLAN, out)
        assert not json.loads(out.with_suffix(".json").read_text())["complete"]
    families.compare(config, PLAN, out)
    assert len(made) == len(set(names(made))) == 16, "no run twice"
    families.compare(config, PLAN, out)
    assert len(made) == 16
    families.compare(config, dataclasses.replace(PLAN, seeds=(1, 5)), out)
    assert {task.seed for task in made[16:]} == {5} and len(made) == 20, "seeds may be added"
    assert json.loads(out.with_suffix(".json").read_text())["seeds"] == [1, 5]
    longer = config.model_copy(update={"train": config.train.model_copy(update={"steps": 5})})
    with pytest.raises(ConfigError, match=r"config.train.steps is 4 there and 5 here; .* choose another --out"):
        families.compare(longer, PLAN, out)
    with pytest.raises(ConfigError, match=r"other settings: sweep is .*0.01.* there"):
        families.compare(config, dataclasses.replace(PLAN, sweep=(1e-3,)), out)
    assert len(made) == 20
    out.with_suffix(".json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        families.compare(config, PLAN, out)


def test_real_runs_in_a_process_of_the_pool_are_those_of_this_one(config: Config, tmp_path: Path, capsys: Any) -> None:
    tasks = [Task(name, 0, 1e-2, families.configuration(config, name, 0, 1e-2, 4)) for name in ("lax", "loro")]
    alone = {task.contender: families.train(task) for task in tasks}
    together = {trained.contender: trained for trained in families.each_trained(tasks, 1)}
    for name, trained in together.items():
        assert dataclasses.replace(trained, seconds=0) == dataclasses.replace(alone[name], seconds=0)
    for trained in alone.values():
        assert len(trained.losses) == 4 and [step for step, _ in trained.heldout] == [1, 2, 3]
        assert 5 < (trained.loss or 0) < 6.5 and (trained.bits_per_byte or 0) > 1
    assert capsys.readouterr().out == ""


def test_runs_are_scored_and_kept_apart_from_those_without(
    config: Config, made: list[Task], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The harness itself is run in test_scores.py."""

    def each(waiting: Sequence[Task], jobs: int) -> Iterator[FamilyRun]:
        for task in waiting:
            made.append(task)
            assert (task.tasks is None) == (task.seed == PLAN.sweep_seed)
            found = dict.fromkeys(SCORES, 0.25 + task.seed / 2) if task.tasks else None
            yield dataclasses.replace(made_up(task), scores=found)

    @contextlib.contextmanager
    def folder(config: Config, questions: int) -> Iterator[Path | None]:
        assert questions == 30
        yield tmp_path

    monkeypatch.setattr(families, "each_trained", each)
    monkeypatch.setattr(families, "task_folder", folder)
    plan = dataclasses.replace(PLAN, questions=30)
    families.compare(config, plan, tmp_path / "f")
    table = (tmp_path / "f.md").read_text()
    assert "on 30 questions per task" in table
    assert table.count("| 50.0 ± 35.4 | 50.0 ± 35.4 | 50.0 ± 35.4 |") == len(FOUR)
    with pytest.raises(ConfigError, match="questions is 30 there and 0 here"):
        families.compare(config, PLAN, tmp_path / "f")


def test_a_rate_that_is_too_high_diverges_and_costs_no_error(config: Config) -> None:
    longer = families.configuration(config, "cola", 0, 1e30, 6)
    trained = families.train(Task("cola", 0, 1e30, longer))
    assert trained.loss is None and trained.bits_per_byte is None
    assert all(math.isfinite(loss) for loss in trained.losses)


def quits(task: Task) -> FamilyRun:
    os._exit(9)


def test_a_lost_process_is_an_error_that_says_to_run_again(config: Config) -> None:
    task = Task("cola", 0, 1e-2, families.configuration(config, "cola", 0, 1e-2, 2))
    with pytest.raises(TrainingError, match="finished runs are kept"):
        list(families.each_trained([task], 1, work=quits))


def test_loro_is_svd_with_its_own_optimizer_and_its_exact_steps(config: Config) -> None:
    loro, svd = (families.configuration(config, name, 1, 0.5, 1000) for name in ("loro", "svd"))
    assert (loro.model, loro.train, loro.data) == (svd.model, svd.train, svd.data)
    optim = loro.optim
    assert (optim.name, optim.schedule, optim.exact_every, optim.restart_warmup_steps) == (
        "loro",
        "cosine-restarts",
        125,
        5,
    )
    assert (optim.eps, optim.weight_decay, optim.clip) == (1e-6, 0, 0)
    assert (optim.lr, optim.min_lr_ratio, optim.warmup_steps) == (
        svd.optim.lr,
        svd.optim.min_lr_ratio,
        svd.optim.warmup_steps,
    )
    assert families.configuration(config, "loro", 1, 0.5, 24).optim.restart_warmup_steps == 3, "no longer than K"
    with pytest.raises(ConfigError, match="optim.name = 'loro' is one of the contenders"):
        families.configuration(loro, "svd", 1, 0.5, 1000)


def test_every_contender_is_timed_in_every_round(config: Config) -> None:
    configs = {name: families.configuration(config, name, 0, 1e-3, 40) for name in families.USUAL}
    assert (*FOUR, "loro") == families.USUAL
    seconds = families.time_steps(configs, 7)
    counts = {name: (len(s["usual"]), len(s["exact"])) for name, s in seconds.items()}
    assert counts == {**dict.fromkeys(FOUR, (7, 0)), "loro": (4, 3)}
    assert all(0 < s < 60 for each in seconds.values() for s in each["usual"] + each["exact"])


def test_runs_of_equal_time(config: Config, made: list[Task], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of lax takes half the time of dense's: twice the steps. Resumed with other times, the steps stay."""
    out, plan = tmp_path / "f", dataclasses.replace(PLAN, equal_time=True)

    def timed(scale: float) -> None:
        seconds = {name: {"usual": [scale * (0.5 if name == "lax" else 1.0)] * 4, "exact": []} for name in FOUR}
        monkeypatch.setattr(families, "time_steps", lambda configs, rounds: seconds)

    timed(1.0)
    families.compare(config, plan, out)
    longer = [task for task in made if task.config.train.steps == 8]
    assert names(longer) == [("lax", 0, 1e-2), ("lax", 1, 1e-2)] and made[-2:] == longer
    assert longer[0].config.optim.warmup_steps == 4
    facts: dict[str, Any] = json.loads(out.with_suffix(".json").read_text())
    assert facts["equal_steps"] == {"dense": 4, "svd": 4, "cola": 4, "lax": 8}
    rows = {row["contender"]: row for row in families_report.rows(facts)}
    assert rows["svd"]["equal_loss"] == rows["svd"]["loss"] and rows["lax"]["equal_loss"] is not None
    assert "held-out loss at equal time" in out.with_suffix(".md").read_text()
    timed(3.0)
    count = len(made)
    families.compare(config, dataclasses.replace(plan, rounds=5, seeds=(0, 1, 2)), out)
    assert names(made[count:])[-1] == ("lax", 2, 1e-2) and made[-1].config.train.steps == 8


def test_an_exact_step_in_k_counts_for_its_share() -> None:
    seconds = {"usual": [1.0, 1.0, 2.0, 1.0, 1.0], "exact": [11.0, 13.0, 9.0]}
    assert families_report.step_seconds(seconds, 20) == pytest.approx((1.5, 1.5, 1.5))
    assert families_report.step_seconds({"usual": [1.0, 2.0, 4.0], "exact": []}, 0) == pytest.approx((2.0, 1.5, 3.0))


def test_curves_are_smoothed_by_what_came_before() -> None:
    assert families_report.smooth([4.0, 2.0, 3.0, 1.0], 2) == [4.0, 3.0, 2.5, 2.0]
