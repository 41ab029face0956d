"""Conversations and text in one run, from `boost prepare` to `boost generate --chat`, as commands."""

import json
from pathlib import Path

import pytest

from boost.data.prepare import PrepareOptions, prepare
from boost.train.metrics import read_metrics
from tests.cli.commands import Capture, done
from tests.data.chats import TEXT, chat_tokenizer, write_conversations
from tests.train.commands import toml

SIZES = {"steps": 6, "save_every": 3, "eval_every": 3, "log_every": 1}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A mixture of conversations and text, as TOML."""
    folder = tmp_path_factory.mktemp("mixed")
    tokenizer, chats = chat_tokenizer(folder / "tokenizer"), write_conversations(folder / "chats.jsonl", 40)
    prepare(PrepareOptions(out=folder / "chat", inputs=(str(chats),), tokenizer=str(tokenizer), heldout=0.2, chat=True))
    (folder / "text.txt").write_text(f"{TEXT}\n" * 200)
    text = (str(folder / "text.txt"),)
    prepare(PrepareOptions(out=folder / "text", inputs=text, tokenizer=str(tokenizer), heldout=0.2))
    return f'{{ "{folder / "chat"}" = 2, "{folder / "text"}" = 1 }}'


def test_a_mixture_is_trained_resumed_evaluated_and_talked_to(mixture: str, tmp_path: Path, capsys: Capture) -> None:
    run = tmp_path / "run"
    config = toml(Path("unused"), tp=1, **SIZES).replace('store = "unused"', f"mixture = {mixture}")
    config = config.replace("= 300", "= 304")
    (file := tmp_path / "run.toml").write_text(f'{config}dir = "{run}"\n')
    out = done(capsys, "train", file)
    assert "66.7% chat: " in out and "33.3% text: " in out
    lines = [line for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "eval"]
    for line in lines:
        losses = line["heldout_losses"]
        assert line["heldout_loss"] == pytest.approx((2 * losses["chat"] + losses["text"]) / 3, rel=1e-12)
        assert f"(chat {losses['chat']:.4f}  text {losses['text']:.4f})" in out
    out = done(capsys, "eval", run, "--json")
    assert json.loads(out)["losses"] == pytest.approx(lines[-1]["heldout_losses"], rel=1e-6)
    out = done(capsys, "eval", run)
    assert "loss on chat" in out and "loss on text" in out
    done(capsys, "generate", run, "--chat", "--prompt", "why", "--max-tokens", "5", "--json")
    done(capsys, "train", file, "--resume", "auto", "--train.steps", "8")
    begun = tmp_path / "begun"
    words = ("--start-from", run, "--run.dir", begun, "--train.steps", "2")
    assert f"initialized from the weights of {run}" in done(capsys, "train", file, *words)
