"""The command line of `boost prepare`: arguments, output and exit codes."""

import json
from typing import Any

import pytest

from boost.cli import prepare as command
from boost.data.store import TokenStore
from tests.cli.commands import say
from tests.data.inputs import write_texts


@pytest.fixture
def boost(capsys):
    """`boost prepare` with these words: exit code, stdout and stderr."""
    return lambda *words: say(capsys, "prepare", *words)


@pytest.fixture
def corpus(tmp_path):
    folder = write_texts(tmp_path / "texts [red]", (f"text number {i}\n" * 9 for i in range(30)))
    (folder / "image[bold].png").write_bytes(b"\x89PNG\0")
    return folder


def test_the_report_and_the_no_op(corpus, tmp_path, boost):
    arguments = (corpus, "--out", tmp_path / "store", "--tokenizer", "train:270")
    code, first, err = boost(*arguments)
    assert code == 0 and "prepare: encoding" in err
    assert f"1 binary (holds a NUL byte), in {corpus}" in first and "image[bold].png: byte 4" in first
    assert f"{tmp_path / 'store'} written in" in first and "vocab_size 270, eos <|endoftext|> (id 0)" in first
    code, again, err = boost(*arguments)
    assert (code, err) == (0, "") and "is up to date (nothing to do)" in again
    assert again.split("\n\n")[0] == first.split("\n\n")[0]


def test_json_report(corpus, tmp_path, boost):
    code, out, err = boost(corpus, "--out", tmp_path / "store", "--tokenizer", "train:270", "--json")
    assert (code, err) == (0, "")
    report, store = json.loads(out), TokenStore.open(tmp_path / "store")
    assert report["vocab_size"] == store.vocab_size == 270 and report["up_to_date"] is False
    heldout = store.split("heldout")
    assert report["splits"]["heldout"]["unigram_entropy"] == heldout.unigram_entropy()
    assert report["splits"]["heldout"]["bytes_per_token"] == heldout.n_bytes / heldout.n_tokens
    assert report["sources"][0]["skipped"]["binary (holds a NUL byte)"]["count"] == 1


def test_many_skips_are_counted_and_the_rest_is_pointed_at(corpus, tmp_path, boost):
    for i in range(9):
        (corpus / f"empty{i}.txt").write_text("")
    code, out, _ = boost(corpus, "--out", tmp_path / "store", "--tokenizer", "train:270")
    assert code == 0 and "9 empty" in out and "and 4 more; see report.json in the store" in out
    details = json.loads((tmp_path / "store" / "report.json").read_text())
    assert sum("empty" in entry["skipped"] for entry in details[str(corpus)]) == 9


def test_errors_are_one_line_with_exit_code_two(corpus, tmp_path, boost):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    cases = {
        (): "no input given",
        (tmp_path / "latin.txt",): "not UTF-8 text at byte 3",
        (corpus, "--heldout", "2"): "--heldout 2.0",
        (corpus, "--hf-split", "validation"): "--hf-split validation has no effect without --hf; remove it",
    }
    for arguments, message in cases.items():
        code, out, err = boost(*arguments, "--out", tmp_path / "store")
        line = err.splitlines()[-1]
        assert line.startswith("boost: error: ") and message in line and "Traceback" not in err
        assert (code, out) == (2, "") and not (tmp_path / "store").exists()


def test_what_was_read_in_another_form_is_printed(tmp_path, boost):
    (tmp_path / "x.jsonl").write_bytes(b'{"n": 1, "body": "a line\\r\\nof two"}\n' * 20)
    code, out, _ = boost(tmp_path / "x.jsonl", "--out", tmp_path / "store", "--tokenizer", "train:270")
    assert code == 0 and "\nnotes\n" in out
    assert f"20 with CRLF line breaks, normalized to LF, in {tmp_path / 'x.jsonl'}" in out
    assert "1 read from column 'body', because" in out and "\nskipped" not in out


@pytest.mark.parametrize(
    ("inputs", "hf", "stdlib", "out"),
    [
        ([], None, True, "data/stdlib"),
        (["a/book.txt"], None, False, "data/book"),
        (["rows.jsonl.gz", "b"], None, True, "data/rows"),
        (["rows.json.zst"], None, False, "data/rows"),
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
    bar: Any = command.progress_display()
    assert type(bar).__name__ == "Bar"
    for phase in ("looking", "encoding"):
        bar.phase(phase, 100)
        bar.update(50, 3)
    assert [task.description for task in bar.display.tasks] == ["encoding"]
    assert bar.display.tasks[0].completed == 50
    bar.close()
