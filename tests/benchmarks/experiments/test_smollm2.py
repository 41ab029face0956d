"""The experiment with SmolLM2, from a tiny tied model in a folder: both parts, resumed, and their report."""

import json
from pathlib import Path

import pytest

from benchmarks.commands import main
from benchmarks.experiments import smollm2
from benchmarks.experiments.results import Facts
from tests.cli.commands import llama_of
from tests.data.inputs import write_texts


@pytest.fixture
def words(store: Path, tmp_path: Path) -> list[str]:
    weights = llama_of(store, tmp_path / "llama", hidden_size=64, intermediate_size=96, tie_word_embeddings=True)
    texts = (f"def function{n}(value):\n    return value + {n}\n" * 12 for n in range(300))
    text = write_texts(tmp_path / "text", texts)
    words = ["smollm2", "--weights", str(weights), "--data", str(text), "--work", str(tmp_path / "work")]
    words += ["--out", str(tmp_path / "result"), "--questions", "2", "--rounds", "7", "--threads", "1"]
    return [*words, "--train.steps=2", "--train.seq_len=32", "--train.global_batch=2", "--train.micro_batch=2"]


def read(out: Path) -> Facts:
    facts: Facts = json.loads(out.with_suffix(".json").read_text())
    return facts


def test_both_parts(words: list[str], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("lm_eval")
    out = tmp_path / "result"
    assert main([*words, "--part", "speed"]) == 0
    speed = read(out)["speed"]
    assert read(out)["quality"] is None
    assert speed["parameters"][smollm2.HEALED] <= 0.6 * speed["parameters"][smollm2.HF]
    assert speed["tokens"] == 64 and {len(rounds) for rounds in speed["contest"]["seconds"].values()} == {7}

    assert main(words) == 0
    facts = read(out)
    assert facts["speed"] == speed  # kept
    dense, factorized, healed = facts["quality"]["models"]
    assert healed["loss"] < factorized["loss"] and factorized["parameters"] <= 0.6 * dense["parameters"]
    for rows in facts["quality"]["tasks"].values():
        found = {(row["task"], row["metric"]) for row in rows}
        assert smollm2.SCORES.items() <= found
    shown = out.with_suffix(".md").read_text()
    assert f"| healed | {healed['parameters']:,} | " in shown and f"| {healed['perplexity']:.2f} | " in shown
    assert "trains at " in shown and "| transformers LLaMA | " in shown
