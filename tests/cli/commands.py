"""Commands of `boost`, called in this process."""

from pathlib import Path

import pytest

from boost.cli.main import main
from tests.convert.toys import llama_folder

Capture = pytest.CaptureFixture[str]


def say(capture: Capture, *words: object) -> tuple[int, str, str]:
    """Runs a command; returns exit code, stdout and stderr. `capfd` also captures the output of its child processes."""
    code = main([str(word) for word in words])
    out, err = capture.readouterr()
    return code, out, err


def done(capture: Capture, *words: object) -> str:
    """The stdout of a command that succeeds."""
    code, out, err = say(capture, *words)
    assert code == 0, out + err
    return out


def refused(capture: Capture, *words: object) -> str:
    """The stderr of a command with a mistake: one line."""
    code, _, err = say(capture, *words)
    assert code == 2 and err.startswith("boost: error: ") and err.count("\n") == 1, err
    return err


def llama_of(store: Path, folder: Path, **changes: object) -> Path:
    """A folder with tiny LLaMA weights and the tokenizer of a token store, whose documents end in token 0."""
    folder.mkdir(parents=True, exist_ok=True)
    llama_folder(folder, vocab_size=300, eos_token_id=0, bos_token_id=None, **changes)
    (folder / "tokenizer.json").write_text((store / "tokenizer.json").read_text())
    return folder
