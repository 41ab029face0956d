"""What `boost plan` reports besides the best configuration: intervals, defaults, runnable files."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from boost.cli.main import main
from boost.config import load

SMALL = ["--model", "cola-60m", "--gpus", "4", "--gpu", "h100-80g", "--global-batch", "64"]


def facts(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["plan", *words, "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_json_says_what_was_asked_and_how_sure_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    found = facts(capsys, *SMALL)
    assert found["schema"] == 3 and found["argv"][:3] == ["plan", "--model", "cola-60m"]
    best = found["best"]
    low, high = best["step_seconds_interval"]
    assert low < best["step_seconds"] < high and 0.5 < best["fits_probability"] <= 1.0
    assert best["mfu"] < best["mfu_of_all_scores"] < 2 * best["mfu"]


def test_both_conventions_of_mfu(capsys: pytest.CaptureFixture[str]) -> None:
    """By hand: 6 d L FLOPs per token and block for the masked half of the scores."""
    best = facts(capsys, *SMALL)["best"]
    model, train = best["config"]["model"], best["config"]["train"]
    masked = 6 * model["dim"] * train["seq_len"] * model["layers"] * best["tokens_per_second"]
    assert best["mfu_of_all_scores"] - best["mfu"] == pytest.approx(masked / (4 * 989.4e12))


def test_a_written_file_evaluates_and_says_what_is_undecided(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "mine.toml"
    assert main(["plan", "--model", "1b", *SMALL[2:], "--write", str(path)]) == 0
    said, text = capsys.readouterr().out, path.read_text(encoding="utf-8")
    for words in (
        "optim.lr",
        "not tuned",
        "train.steps",
        "per parameter",
        "data.store",
        "checkpoints every 30 minutes",
    ):
        assert words in said and words in text, words
    config = load(str(path))
    assert config.train.eval_every == max(config.train.steps // 20, 1) and config.train.eval_tokens == 2**20
    assert config.run.dir == "runs/boost-1b"  # of the preset; only the default is changed


def test_what_was_asked_for_stays(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    asked = ["--optim.lr", "0.003", "--steps", "700", "--train.eval_every", "33", "--run.dir", "runs/other"]
    assert main(["plan", *SMALL, "--write", str(path), *asked]) == 0
    said = capsys.readouterr().out
    assert "not tuned" not in said and "per parameter" not in said
    config = load(str(path))
    assert (config.optim.lr, config.train.steps, config.train.eval_every, config.run.dir) == (
        0.003,
        700,
        33,
        "runs/other",
    )


def test_a_batch_that_nobody_asked_for_is_a_realistic_one(capsys: pytest.CaptureFixture[str]) -> None:
    """GPT-3's batch for the parameter count if the preset has none for training; otherwise the recipe's own."""
    words = ["--gpus", "8", "--gpu", "h100-80g", "--seq", "4096", "--parallel.tp", "1", "--parallel.pp", "1"]
    assert facts(capsys, "--model", "1b", *words)["tokens"] == 2**19
    assert facts(capsys, "--model", "7b", *words)["tokens"] == 2**20
    assert facts(capsys, "--model", "cola-60m", *words[:4])["global_batch"] == load("cola-60m").train.global_batch


def test_a_margin_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert facts(capsys, *SMALL)["best"]["memory_margin"] == 0.08
    assert facts(capsys, *SMALL, "--memory-margin", "20%")["best"]["memory_margin"] == 0.2
    with pytest.raises(SystemExit):
        main(["plan", *SMALL, "--memory-margin", "110%"])
    assert "examples: 8%, 0.08" in capsys.readouterr().err


@pytest.mark.slow
def test_the_same_question_has_the_same_answer() -> None:
    """Identical to the last digit in processes with different hash seeds."""
    command = [sys.executable, "-m", "boost.cli.main", "plan", *SMALL, "--json"]
    said = {subprocess.check_output(command, env={**os.environ, "PYTHONHASHSEED": seed}) for seed in ("1", "2")}
    assert len(said) == 1


def test_a_hugging_face_config_is_a_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """From a folder or its config.json, as is or as a low-rank family of the same shape; the written file can be run."""
    shape = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 4, "num_attention_heads": 8}
    content = {"model_type": "llama", **shape, "num_key_value_heads": 4, "vocab_size": 32000}
    content |= {"max_position_embeddings": 1024, "rms_norm_eps": 1e-5}
    (tmp_path / "config.json").write_text(json.dumps(content), encoding="utf-8")
    words = ["--gpus", "2", "--gpu", "h100"]
    best = facts(capsys, "--model", str(tmp_path), *words)["best"]["config"]
    assert (best["model"]["family"], best["model"]["kv_heads"], best["train"]["seq_len"]) == ("dense", 4, 1024)
    path = tmp_path / "run.toml"
    assert (
        main(["plan", "--model", str(tmp_path / "config.json"), "--family", "cola", *words, "--write", str(path)]) == 0
    )
    config = load(str(path))
    assert (config.model.family, config.model.rank, config.model.layers) == (
        "cola",
        128,
        4,
    ) and config.run.dir == "runs/run"
    capsys.readouterr()
    assert main(["plan", "--model", str(tmp_path), *words]) == 0
    out = capsys.readouterr().out
    assert "command (after --write run.toml)" in out and "boost train run.toml" in out
    (tmp_path / "config.json").write_text(json.dumps(content | {"model_type": "gpt2"}), encoding="utf-8")
    assert main(["plan", "--model", str(tmp_path), *words]) == 2 and "model_type = 'gpt2'" in capsys.readouterr().err
