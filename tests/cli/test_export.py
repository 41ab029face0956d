"""`boost export` as users see it."""

import json
import shutil
from pathlib import Path

import pytest

from boost.cli import export
from boost.files import new_folder
from tests import toy
from tests.cli.commands import Capture, done, llama_of, say
from tests.convert.toys import save


def test_a_checkpoint_becomes_a_folder(
    tmp_path: Path, store: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = toy.toy_config("float32", model={"family": "svd"})
    save(tmp_path / "run" / "checkpoints", config, store / "tokenizer.json")
    out = done(capsys, "export", str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--json")
    facts = json.loads(out)
    assert (facts["format"], facts["trust_remote_code"], facts["files"]) == ("LlamaForCausalLM", False, 1)
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md",
    }  # fmt: skip
    monkeypatch.setattr(export, "FILE_BYTES", 10_000)
    words = ["export", str(tmp_path / "run"), "--no-merge", "--dtype", "bfloat16"]
    out = done(capsys, *words, "--out", str(tmp_path / "factors"))
    assert "BoostForCausalLM" in out
    assert "bfloat16" in out
    assert (tmp_path / "factors" / "modeling_boost.py").is_file()
    assert (tmp_path / "factors" / "model.safetensors.index.json").is_file()


def test_mistakes_are_one_line(tmp_path: Path, store: Path, capsys: Capture) -> None:
    path = save(tmp_path / "c", toy.toy_config("float32"), store / "tokenizer.json")
    out = tmp_path / "out"
    for words, expected in (
        ([str(tmp_path / "nowhere")], "no checkpoint at"),
        ([str(path), "--out", str(store)], "is not an empty folder"),
        ([str(path), "--out", str(store / "tokenizer.json" / "x")], "cannot be written"),
    ):
        code, said, err = say(capsys, "export", "--out", str(out), *words)
        assert (code, said, err.count("\n")) == (2, "", 1), err
        assert expected in err
        assert not out.exists()


def test_a_folder_is_written_by_one_command(tmp_path: Path, store: Path, capsys: Capture) -> None:
    path, out = save(tmp_path / "c", toy.toy_config("float32"), store / "tokenizer.json"), tmp_path / "out"
    (tmp_path / ".out.tmp").mkdir()
    words = {"export": [path], "import": [llama_of(store, tmp_path / "hf")]}
    for command, source in words.items():
        with new_folder(out, "--out"):
            code, said, err = say(capsys, command, *source, "--out", out)
        assert (code, said, err.count("\n")) == (2, "", 1) and "is being written by another process" in err
        assert say(capsys, command, *source, "--out", out)[0] == 0
        shutil.rmtree(out)
    assert (tmp_path / ".out.tmp").exists(), "a folder of someone else"
