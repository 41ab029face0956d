"""Scores of models that are being trained are those that `boost eval --tasks` finds."""

import json
import math
import os
from pathlib import Path

import pytest
import torch

from benchmarks import local_tasks
from benchmarks.experiments import scores
from benchmarks.experiments.curves import at_start
from boost.config import Config
from boost.models.decoder import Decoder
from boost.parallel.mesh import Mesh
from tests import toy
from tests.distributed import run_distributed

QUESTIONS = 20


def make_config(store: Path, run: Path, tp: int) -> Config:
    return toy.toy_config(
        "float32",
        model={"family": "cola", "vocab_size": 300, "layers": 1},
        parallel={"tp": tp},
        train={"seq_len": 64, "micro_batch": 4, "global_batch": 4},
        data={"store": str(store)},
        run={"dir": str(run), "device": "cpu"},
    )


def answered(config: Config, folder: Path) -> scores.Scored | None:
    mesh = toy.mesh(tp=2) if config.parallel.tp == 2 else Mesh(torch.device("cpu"))
    return scores.scored(at_start(config, mesh), folder)


def scored(config: Config, folder: Path) -> dict[str, float]:
    found = answered(config, folder)
    return found.accuracy if found else {}


def on_each(config: Config, folder: Path, rank_variable: str) -> scores.Scored | None:
    """On one process each: every one is the first of its own model, whatever its LOCAL_RANK."""
    os.environ[rank_variable] = str(torch.distributed.get_rank())
    try:
        return answered(config, folder)
    finally:
        del os.environ[rank_variable]


def test_two_processes_score_as_one_and_as_the_definition(
    store: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    config = make_config(store, tmp_path / "run", 1)
    with scores.task_folder(config, QUESTIONS) as folder:
        assert folder is not None and len(list(folder.glob("*.yaml"))) == len(local_tasks.TASKS)
        alone = scored(config, folder)
        assert alone.keys() == scores.SCORES.keys() and all(0 <= value <= 1 for value in alone.values())
        assert alone["local_order acc"] * QUESTIONS % 1 == pytest.approx(0, abs=1e-9)
        both = run_distributed(2, scored, make_config(store, tmp_path / "run", 2), folder)
        assert both[0] == pytest.approx(alone)
        answers = run_distributed(2, on_each, config, folder, "LOCAL_RANK")
        assert answers[0] == answers[1] and answers[0].accuracy == pytest.approx(alone)
        assert len(answers[0].answers) == 3 * QUESTIONS and set(answers[0].answers) <= set("0123")
        order = [json.loads(line)["answer"] for line in (folder / "local_order.jsonl").read_text().splitlines()]
        right = [int(a) == b for a, b in zip(answers[0].answers[2 * QUESTIONS :], order, strict=True)]
        assert sum(right) / QUESTIONS == pytest.approx(alone["local_order acc"])
        capfd.readouterr()
        # A model that finds every token equally likely prefers the choice of fewest tokens.
        monkeypatch.setattr(Decoder, "logits_of", lambda self, tokens, wanted: torch.zeros(len(wanted), 300))
        found = scored(config, folder)
        assert capfd.readouterr().err == "", "progress bars of the harness are not shown"
        asked = [json.loads(line) for line in (folder / "local_continuation.jsonl").read_text().splitlines()]
    from boost.data.fit import open_corpus

    tokenizer = open_corpus(config).stores[0].tokenizer()
    lengths = [[len(tokenizer.encode(f" {choice}").ids) for choice in each["choices"]] for each in asked]
    right = [each["answer"] == of_each.index(min(of_each)) for each, of_each in zip(asked, lengths, strict=True)]
    assert found["local_continuation acc"] == pytest.approx(sum(right) / QUESTIONS)
    assert found["local_cloze acc"] == 0 and not math.isnan(found["local_order acc"])
