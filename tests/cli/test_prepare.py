"""The command line of `boost prepare`: arguments, output and exit codes."""

import argparse
import json

import numpy as np
import pytest

from boost.cli import prepare as command
from boost.cli.main import print_error
from boost.data.store import TokenStore
from boost.errors import BoostError
from tests.data.chats import chat_tokenizer, write_conversations


def boost(*argv):
    """Exit code of `boost prepare ...`, including the command's own parser and error line."""
    parser = argparse.ArgumentParser(prog="boost")
    command.add_parser(parser.add_subparsers(required=True))
    try:
        return command.run(parser.parse_args(["prepare", *map(str, argv)]))
    except BoostError as error:
        print_error(str(error))
        return error.exit_code


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "texts [red]"
    folder.mkdir()
    for i in range(30):
        (folder / f"{i:02}.txt").write_text(f"text number {i}\n" * 9)
    (folder / "image[bold].png").write_bytes(b"\x89PNG\0")
    return folder


def test_the_report_and_the_no_op(corpus, tmp_path, capsys):
    arguments = (corpus, "--out", tmp_path / "store", "--tokenizer", "train:270")
    assert boost(*arguments) == 0
    first = capsys.readouterr()
    assert "prepare: encoding" in first.err
    assert f"1 binary (holds a NUL byte), in {corpus}" in first.out and "image[bold].png: byte 4" in first.out
    assert f"{tmp_path / 'store'} written in" in first.out and "vocab_size 270, eos <|endoftext|> (id 0)" in first.out
    assert boost(*arguments) == 0
    again = capsys.readouterr()
    assert again.err == "" and "is up to date, nothing to do" in again.out
    assert again.out.split("\n\n")[0] == first.out.split("\n\n")[0]


def test_json_report(corpus, tmp_path, capsys):
    assert boost(corpus, "--out", tmp_path / "store", "--tokenizer", "train:270", "--json") == 0
    captured = capsys.readouterr()
    report, store = json.loads(captured.out), TokenStore.open(tmp_path / "store")
    assert captured.err == ""
    assert report["vocab_size"] == store.vocab_size == 270 and report["up_to_date"] is False
    heldout = store.split("heldout")
    assert report["splits"]["heldout"]["unigram_entropy"] == heldout.unigram_entropy()
    assert report["splits"]["heldout"]["bytes_per_token"] == heldout.n_bytes / heldout.n_tokens
    assert report["sources"][0]["skipped"]["binary (holds a NUL byte)"]["count"] == 1


def test_many_skips_are_counted_and_the_rest_is_pointed_at(corpus, tmp_path, capsys):
    for i in range(9):
        (corpus / f"empty{i}.txt").write_text("")
    assert boost(corpus, "--out", tmp_path / "store", "--tokenizer", "train:270") == 0
    out = capsys.readouterr().out
    assert "9 empty" in out and "and 4 more, see report.json in the store" in out
    details = json.loads((tmp_path / "store" / "report.json").read_text())
    assert sum("empty" in entry["skipped"] for entry in details[str(corpus)]) == 9


def test_errors_are_one_line_with_exit_code_two(corpus, tmp_path, capsys):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    cases = {
        (): "no input given",
        (tmp_path / "missing",): "no such file or folder",
        (tmp_path / "latin.txt",): "not UTF-8 text at byte 3",
        (corpus, "--tokenizer", "./none.json"): "no such file",
        (corpus, "--eos", "<x>", "--tokenizer", "train:3"): "the size must be an integer of at least 257",
        (corpus, "--heldout", "2"): "--heldout 2.0",
    }
    for arguments, message in cases.items():
        assert boost(*arguments, "--out", tmp_path / "store") == 2
        captured = capsys.readouterr()
        line = captured.err.splitlines()[-1]
        assert line.startswith("boost: error: ") and message in line and "Traceback" not in captured.err
        assert captured.out == "" and not (tmp_path / "store").exists()


def test_what_was_read_in_another_form_is_printed(tmp_path, capsys):
    (tmp_path / "x.csv").write_bytes(b"n,body\r\n" + b'1,"a line\r\nof two"\r\n' * 20)
    assert boost(tmp_path / "x.csv", "--out", tmp_path / "store", "--tokenizer", "train:270") == 0
    out = capsys.readouterr().out
    assert "\nnotes\n" in out and f"20 with CRLF line breaks, normalized to LF, in {tmp_path / 'x.csv'}" in out
    assert "1 no column 'text'; text read from 'body'" in out and "\nskipped" not in out


def test_ids_of_another_tool(corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert boost(corpus, "--out", "text", "--tokenizer", "train:270") == 0
    np.array([0, 5, 6, 0, 7, 8, 0, 9] * 50, "<u2").tofile(tmp_path / "fine.bin")
    capsys.readouterr()
    assert boost("--from-tokens", "fine.bin", "--tokenizer", "text") == 0
    out = capsys.readouterr().out
    assert "data/fine written in" in out and "1 empty document, in fine.bin" in out
    assert TokenStore.open("data/fine").split("train").n_documents > 50
    assert boost("--from-tokens", "fine.bin", "--tokenizer", "text", "--token-dtype", "uint32") == 2
    assert "already holds a token store made from different input" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("inputs", "hf", "stdlib", "out"),
    [
        ([], None, True, "data/stdlib"),
        (["a/book.txt"], None, False, "data/book"),
        (["rows.jsonl.gz", "b"], None, True, "data/rows"),
        (["rows.csv.zst"], None, False, "data/rows"),
        ([], "owner/rows:english", False, "data/rows"),
        (["v1.2/x.tar.txt"], None, False, "data/x.tar"),
    ],
)
def test_default_store(inputs, hf, stdlib, out):
    assert command.default_out(inputs, hf, stdlib) == out


def test_default_store_of_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "v1.5").mkdir()
    assert command.default_out(["v1.5/"], None, False) == "data/v1.5"
    assert command.default_out(["."], None, False) == f"data/{tmp_path.name}"


def test_the_progress_bar_draws(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    bar = command.progress_display()
    assert type(bar).__name__ == "Bar"
    for phase in ("looking", "encoding"):
        bar.phase(phase, 100)
        bar.update(50, 3)
    assert [task.description for task in bar.display.tasks] == ["encoding"]
    assert bar.display.tasks[0].completed == 50
    bar.close()


def test_conversations(tmp_path, capsys):
    chats = write_conversations(tmp_path / "chats.jsonl", 30)
    arguments = ("--chat", chats, "--tokenizer", chat_tokenizer(tmp_path / "tokenizer"), "--out", tmp_path / "store")
    assert boost(*arguments) == 0
    out = capsys.readouterr().out
    assert "in the loss" in out and "tokens count toward the loss, per the chat template's prompts" in out
    sizes = TokenStore.open(tmp_path / "store").meta["splits"]["train"]
    assert f"{sizes['targets']:,}" in out and 0 < sizes["targets"] < sizes["tokens"]
    assert boost("--chat", tmp_path / "none.jsonl", "--tokenizer", tmp_path / "tokenizer") != 0
    assert "no such file or folder; check the spelling\n" in capsys.readouterr().err
