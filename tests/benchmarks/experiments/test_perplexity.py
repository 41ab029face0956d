"""Layouts are trained alike, paired by seed, resumed where they stopped; a layout that matters as much as the seed is named."""

import contextlib
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.experiments import perplexity
from benchmarks.experiments.perplexity import ConvergenceExperiment, ConvergenceRun, Task, tasks_of, turns
from benchmarks.experiments.perplexity_report import rows
from benchmarks.experiments.scores import SCORES, Scored
from boost.config import Config
from boost.errors import ConfigError, TrainingError
from boost.parallel.mesh import Mesh
from boost.train.evaluate import Evaluation
from boost.train.loop import Trainer
from tests import toy
from tests.distributed import run_distributed

FEW = ("single", "megatron", "btp-cp", "ulysses")
PLAN = ConvergenceExperiment(("cola",), (0, 1, 2), ("float32", "bfloat16"), (0, 1), questions=0)


def make_config(store: Path, run: Path, steps: int = 3) -> Config:
    return toy.toy_config(
        "float32",
        model={"vocab_size": 300, "layers": 1},
        optim={"lr": 3e-3, "warmup_steps": 1},
        parallel={"tp": 2},
        train={"steps": steps, "seq_len": 32, "micro_batch": 4, "global_batch": 4, "eval_tokens": 256},
        data={"store": str(store)},
        run={"dir": str(run), "device": "cpu"},
    )


def run_experiment(config: Config, plan: ConvergenceExperiment, out: Path, stop_after: int) -> tuple[int, str, Any]:
    """Exit code (-1: interrupted in turn `stop_after`), stdout, and the keys of the runs in which this process took part."""
    said, made, taken = io.StringIO(), list[Any](), list[Any]()
    usual, usual_trained, usual_turn = perplexity.heldout, perplexity.trained, perplexity._train_turn

    def some(trainer: Trainer, tokens: int | None) -> Evaluation:
        found = usual(trainer, tokens)
        assert found.tokens == 256, "of about train.eval_tokens"
        if trainer.config.parallel.layout != "btp-cp" or trainer.mesh.tp.size == 1:
            return found
        return Evaluation(found.tokens, found.loss, 1.5 * found.perplexity, found.bits_per_byte)

    def trained(task: Task, mesh: Mesh, folder: Path | None) -> ConvergenceRun:
        made.append(task.key)
        return usual_trained(task, mesh, folder)

    def turn(tasks: Sequence[Task], mesh: Mesh, folder: Path | None) -> ConvergenceRun | None:
        if len(taken) == stop_after:
            raise KeyboardInterrupt
        taken.append(tasks)
        return usual_turn(tasks, mesh, folder)

    def scored(trainer: Trainer, folder: Path) -> Scored | None:
        changed = "1" if trainer.config.parallel.layout == "ulysses" else "0"
        return Scored(dict.fromkeys(SCORES, 0.5), "0" * 59 + changed) if trainer.mesh.rank == 0 else None

    @contextlib.contextmanager
    def folder(config: Config, questions: int) -> Any:
        yield out.parent if questions else None

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr(perplexity, "open_mesh", lambda *_: toy.mesh(tp=2))
        patch.setattr(perplexity, "close_mesh", lambda: None)
        patch.setattr(perplexity, "_train_turn", turn)
        patch.setattr(perplexity, "heldout", some)
        patch.setattr(perplexity, "trained", trained)
        patch.setattr(perplexity, "scored", scored)
        patch.setattr(perplexity, "task_folder", folder)
        few = {f: [each for each in perplexity.layouts(f) if each.name in FEW] for f in perplexity.FAMILIES}
        patch.setattr(perplexity, "layouts", few.get)
        try:
            return perplexity.perplexity_process(config, plan, out), said.getvalue(), made
        except KeyboardInterrupt:
            return -1, said.getvalue(), made


@pytest.mark.nightly
def test_every_family_and_answers_after_an_interruption_and_a_layout_that_matters_as_much_as_a_seed(
    store: Path, tmp_path: Path
) -> None:
    config, out = make_config(store, tmp_path / "run"), tmp_path / "drifting"
    plan = ConvergenceExperiment(("dense", "loro"), (0, 1), ("float32",), (0, 1), questions=20)
    (code, _, made), (_, _, others) = run_distributed(2, run_experiment, config, plan, out, 3)
    assert code == -1 and made[-1] == others[-1], "two turns of single runs, one of others"
    alone = {(family, "single", "float32", seed) for family in plan.families for seed in (0, 1)}
    assert {*made[:2], *others[:2]} == alone, "each on one of the two processes"
    facts = json.loads(out.with_suffix(".json").read_text())
    assert len(facts["runs"]) == 4 + 1 and not facts["complete"]

    (code, said, more), (_, silence, _) = run_distributed(2, run_experiment, config, plan, out, -1)
    assert (code, silence) == (1, "") and not set(more) & set(made), "no run twice"
    named = [line.split(" | ")[0].strip("| ") for line in said.splitlines() if "does not hold" in line]
    assert named == ["loro", "btp-cp"], "in the table of all families, and in its family's"
    facts = json.loads(out.with_suffix(".json").read_text())
    assert facts["complete"] and {len(run["losses"]) for run in facts["runs"]} == {3}
    found = {(row.family, row.layout): row for row in rows(facts)}
    assert [layout for family, layout in found if family == "dense"] == ["single", "megatron", "ulysses"]
    assert max(row.share for (family, _), row in found.items() if family == "dense") < 0.1
    assert {row.changed for (_, layout), row in found.items() if layout != "ulysses"} == {0}
    assert (found["loro", "ulysses"].changed, found["loro", "ulysses"].questions) == (1, 60)

    (code, _, none), _ = run_distributed(2, run_experiment, config, plan, out, -1)
    assert (code, none) == (1, [])
    with pytest.raises(ConfigError, match=r"config.train.steps is 3 there and 4 here"):
        perplexity.start(make_config(store, tmp_path / "run", 4), plan, out)


def test_runs_differ_in_their_cut_dtype_and_seed_and_nothing_else(store: Path, tmp_path: Path) -> None:
    config = make_config(store, tmp_path)
    plan = ConvergenceExperiment(tuple(perplexity.FAMILIES), (0, 1, 2), ("float32", "bfloat16"), (2,), 0)
    tasks = tasks_of(config, plan)
    assert len({task.key for task in tasks}) == len(tasks) == (3 + 1) * (4 + 4 * 8)
    for task in tasks:
        run = task.config
        alone = perplexity.configuration(config, task.family, perplexity.ONE_PROCESS, task.dtype, task.seed)
        assert run.model_copy(update={"parallel": alone.parallel}) == alone, task.key
        assert (run.train.compute_dtype, run.train.param_dtype) == (task.dtype, "float32")
        assert run.parallel.tp == (1 if task.layout == "single" else 2) and run.train.seed == task.seed
    assert {task.config.optim.name for task in tasks if task.family == "loro"} == {"loro"}
    assert {task.seed for task in tasks if task.dtype == "bfloat16"} == {2}
    tp16 = config.model_copy(update={"parallel": config.parallel.model_copy(update={"tp": 16})})
    with pytest.raises(ConfigError, match=r"parallel.tp = 16 must divide"):
        tasks_of(tp16, plan)
    parts = turns(tasks, 2)
    assert sorted(task.key for turn in parts for task in turn) == sorted(task.key for task in tasks)
    assert {len(turn) for turn in parts if turn[0].layout == "single"} == {1, 2}
    assert all(len(turn) == 1 for turn in parts if turn[0].layout != "single")
    assert all(len({task.dtype for task in turn}) == 1 for turn in parts)


def test_a_loss_that_is_not_finite_is_an_error(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (task, *_) = tasks_of(make_config(store, tmp_path), PLAN)
    monkeypatch.setattr(perplexity, "losses", lambda trainer: [5.0, float("nan"), 5.0])
    with pytest.raises(TrainingError, match="cola, single, float32, seed 0: the loss is not finite"):
        perplexity.trained(task, toy.toy_mesh(task.config), None)
