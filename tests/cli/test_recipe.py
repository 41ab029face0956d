"""`boost recipe` from C4's own files to the comparison, interrupted and continued."""

import io
import json
from pathlib import Path

import pytest

from boost.data.store import TokenStore
from tests.cli.commands import Capture, done, refused, say
from tests.data.web import write_c4

MODEL = {
    "model.dim": 32, "model.ffn_dim": 64, "model.layers": 1, "model.heads": 2, "model.rank": 8, "model.vocab_size": 320,
    "train.seq_len": 16,
       "train.global_batch": 4, "train.micro_batch": 4, "train.compute_dtype": "float32", "run.device": "cpu",
    "run.peak_tflops": 1.0,
}  # fmt: skip


@pytest.fixture
def c4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_c4(tmp_path / "en")


def command(c4: Path, *more: str, steps: int = 6) -> list[str]:
    keys = [word for key, value in MODEL.items() for word in (f"--{key}", str(value))]
    return ["recipe", "c4-60m", "--data", str(c4), "--tokenizer", "train:300", "--steps", str(steps), *keys, *more]


def test_the_list(capsys: Capture) -> None:
    lines = say(capsys, "recipe")[1].splitlines()
    assert lines[1].split()[:5] == ["c4-60m", "cola-60m", "allenai/c4:en", "1.31B", "34.04"]
    assert len(lines) > 13


def test_the_budget_comes_first(c4: Path, capsys: Capture) -> None:
    out = done(capsys, *command(c4, "--dry-run"))
    for words in (
        "c4-60m: cola ", "384 (6 steps of 64), 200k held out; published run: 1.31B", f"{c4}; tokenizer train:300",
        "for data/c4-384, ", "B free", "perplexity 34.04",
    ):  # fmt: skip
        assert words in out, words
    assert not Path("data").exists() and not Path("runs").exists()


def test_nobody_to_ask(c4: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert "add --yes to start, or --dry-run" in refused(capsys, *command(c4))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["c4-60m", "--data", "nowhere"], "--data = 'nowhere' is not a folder"),
        (["c4-60m", "--data", "."], "--data = '.' contains no file with 'train' in its name, and no folder 'train'"),
        (["c4-61m"], "no recipe named 'c4-61m'; valid names: c4-60m"),
        (["c4-60m", "--steps", "0"], "--steps = 0 is too small"),
    ],
)
def test_errors_are_one_line(c4: Path, words: list[str], message: str, capsys: Capture) -> None:
    assert message in refused(capsys, "recipe", *words)


def test_from_the_data_to_the_comparison(c4: Path, capsys: Capture) -> None:
    out = done(capsys, *command(c4, "--yes"))
    assert out.index("1/3 prepare") < out.index("2/3 train") < out.index("step     6/6") < out.index("3/3 compare")
    assert "34.04 (CoLA, arXiv 2502.10940); not comparable" in out and "another model and 0.00% of" in out
    found = json.loads(Path("runs/c4-60m-384/recipe.json").read_text())
    store = TokenStore.open("data/c4-384")
    heldout = store.split("heldout")
    short = sum(min(int(b - a), 16) - 1 for a, b in zip(heldout.documents[:-1], heldout.documents[1:], strict=True))
    assert found["heldout_tokens"] == short and not found["complete"]
    assert 1 < found["perplexity"] < 400 and found["perplexity"] != found["perplexity_of_all_tokens"]
    assert 385 <= store.split("train").n_tokens < 600

    code, again, _ = say(capsys, *command(c4))  # has begun: nothing to ask, and nothing left to do
    assert (
        code == 0
        and "data/c4-384 is up to date" in again
        and "runs/c4-60m-384 is finished" in again
        and "eval" not in again
    )
    assert json.loads(Path("runs/c4-60m-384/recipe.json").read_text()) == found
    Path("runs/c4-60m-384/recipe.json").write_text('{"step": 6, "perplexity": "low"}')  # is evaluated again
    assert done(capsys, *command(c4)).splitlines()[-3:] == again.splitlines()[-3:]
    assert json.loads(Path("runs/c4-60m-384/recipe.json").read_text()) == found


def test_too_little_data_is_an_error(c4: Path, capsys: Capture) -> None:
    code, _, err = say(capsys, *command(c4, "--yes", steps=10_000))
    assert code == 2 and "the recipe reads 640k; " in err and "pass --steps " in err
