"""The experiment trains all layouts alike and reports a layout that matters as much as the seed."""

import contextlib
import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.experiments import perplexity
from benchmarks.experiments.perplexity import PerplexityRun, rows, section
from boost.config import Config
from boost.errors import ConfigError
from boost.measure.results import facts_of
from boost.train.evaluate import Evaluation
from boost.train.loop import Trainer
from tests import toy
from tests.distributed import run_distributed

SEEDS = [0, 1]


def make_config(store: Path, run: Path) -> Config:
    return toy.toy_config(
        "float32",
        model={"vocab_size": 300, "layers": 1},
        optim={"lr": 3e-3, "warmup_steps": 1},
        parallel={"tp": 2},
        train={"steps": 3, "seq_len": 32, "micro_batch": 4, "global_batch": 4},
        data={"store": str(store)},
        run={"dir": str(run), "device": "cpu"},
    )


def run_experiment(config: Config, out: Path) -> tuple[int, str]:
    said, usual = io.StringIO(), perplexity.heldout

    def some(trainer: Trainer) -> Evaluation:
        found = usual(trainer, 256)
        if "drifting" not in out.name or trainer.config.parallel.layout != "btp-sp" or trainer.mesh.tp.size == 1:
            return found
        return Evaluation(found.tokens, found.loss, 1.5 * found.perplexity, found.bits_per_byte)

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr(perplexity, "open_mesh", lambda *_: toy.mesh(tp=2))
        patch.setattr(perplexity, "close_mesh", lambda: None)
        patch.setattr(perplexity, "heldout", some)
        return perplexity.perplexity_process(config, ["cola"], None, SEEDS, out), said.getvalue()


def test_layouts_end_where_one_process_does(store: Path, tmp_path: Path) -> None:
    out = tmp_path / "out" / "p"
    (code, said), (_, silence) = run_distributed(2, run_experiment, make_config(store, tmp_path / "run"), out)
    assert (code, silence) == (0, "") and "btp-sp" in said
    facts: dict[str, Any] = json.loads(out.with_suffix(".json").read_text())
    assert facts["dtype"] == "float32"
    found = {row.layout: row for row in rows(facts)}
    assert list(found) == ["single", "btp, online", "btp, sync", "btp-sp", "vanilla", "vanilla, published"]
    assert len(facts["runs"]) == len(found) * len(SEEDS) and {len(run["losses"]) for run in facts["runs"]} == {3}
    assert found["single"].share is None and found["single"].perplexity[1] > 0
    assert all(row.share is not None and row.share < 1e-3 for row in found.values() if row.layout != "single")
    assert out.with_suffix(".md").read_text().count("| holds |") == len(found) - 1
    assert (out.parent / "perplexity.svg").read_text().startswith("<?xml")


def test_a_layout_that_matters_as_much_as_a_seed_is_named(store: Path, tmp_path: Path) -> None:
    config = make_config(store, tmp_path / "run")
    (code, said), _ = run_distributed(2, run_experiment, config, tmp_path / "drifting")
    assert code == 1
    assert [line.split(" | ")[1] for line in said.splitlines() if "does not hold" in line] == ["btp-sp"]


def test_runs_differ_in_their_cut_and_seed_and_nothing_else(store: Path, tmp_path: Path) -> None:
    config = make_config(store, tmp_path)
    work = list(perplexity.work(config, ["cola", "dense"], "bfloat16", SEEDS))
    assert len(work) == 2 * (6 + 3)
    for layout, run in work:
        assert (run.optim, run.data) == (config.optim, config.data), layout
        assert (run.train.param_dtype, run.train.compute_dtype) == ("float32", "bfloat16")
        assert run.train.model_copy(update={"seed": 0}) == work[0][1].train
        assert run.parallel.tp == (1 if layout == "single" else 2)
    assert {run.train.seed for _, run in work} == {0, 1}
    tp16 = config.model_copy(update={"parallel": config.parallel.model_copy(update={"tp": 16})})
    with pytest.raises(ConfigError, match=r"parallel.tp = 16 must divide"):
        list(perplexity.work(tp16, ["cola"], "float32", SEEDS))


def test_differences_are_of_the_same_seed() -> None:
    """Single-process perplexities 10 and 14: a standard deviation of sqrt 8; the layout differs by at most 0.2."""
    runs = [
        PerplexityRun("cola", layout, seed, [3.0, 2.0 + seed], 2.0, value)
        for layout, values in (("single", (10.0, 14.0)), ("btp", (10.1, 13.8)))
        for seed, value in enumerate(values)
    ]
    facts = facts_of(
        "perplexity", toy.toy_config(), dtype="float32", seeds=SEEDS, limit=0.1, runs=list(map(asdict, runs))
    )
    single, btp = rows(facts)
    assert single.perplexity == pytest.approx((12, 8**0.5)) and single.loss == pytest.approx((2.5, 0.5**0.5))
    assert btp.apart == pytest.approx(0.2) and btp.share == pytest.approx(0.2 / 8**0.5) and btp.holds
    facts["runs"][3]["perplexity"] = 13.7
    assert not rows(facts)[1].holds
    assert "does not hold" in str(section(facts).parts[1])
