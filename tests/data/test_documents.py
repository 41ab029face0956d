"""Rules for text of every format: line breaks, long documents, the column with the text."""

import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from boost.data import documents, readers
from boost.data.documents import Unreadable, find_text_column, split_long
from boost.data.report import FileReport
from boost.data.sources import FilesSource
from tests.data.inputs import notes, read, skips


def test_crlf_is_normalized_and_noted(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\r\n")
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "x\\r\\ny"}\r\n{"text": "z"}\r\n')
    (tmp_path / "c.txt").write_bytes(b"a progress bar\rover itself\n")
    found, report = read(FilesSource(tmp_path))
    assert found == [
        ("a.txt", "one\ntwo\n"), ("b.jsonl:1", "x\ny"), ("b.jsonl:2", "z"), ("c.txt", "a progress bar\rover itself\n")
    ]  # fmt: skip
    noted = "with CRLF line breaks, normalized to LF"
    assert notes(report) == {("a.txt", noted): [], ("b.jsonl", noted): ["line 1"]}
    assert report.sources[0].as_dict()["bytes"] == sum(len(text) for _, text in found)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.text(alphabet="ab \n\r\N{GRINNING FACE}\ud800", max_size=40)), st.integers(2, 17))
def test_parts_are_the_text_and_not_longer_than_the_limit(pieces, limit):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "PART_CHARS", limit)
        parts = list(split_long(pieces))
    assert "".join(parts) == "".join(pieces)
    assert all(0 < len(part) <= limit for part in parts)
    assert not any(a.endswith("\r") and b.startswith("\n") and len(a) > 1 for a, b in pairwise(parts))


def test_boundaries_are_paragraphs_then_lines_then_words(monkeypatch):
    monkeypatch.setattr(documents, "PART_CHARS", 10)
    assert list(split_long(["1234567\n\n9 abc\ndefg hi jklmnopqrstuvwx"])) == [
        "1234567\n\n", "9 abc\n", "defg hi ", "jklmnopqrs", "tuvwx"
    ]  # fmt: skip


def test_a_long_text_file_becomes_documents_and_nothing_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "MAX_DOCUMENT_CHARS", 1000)
    monkeypatch.setattr(documents, "PART_CHARS", 100)
    monkeypatch.setattr(readers, "CHUNK", 64)
    text = "\ufeff" + "".join(f"Line é {i} of the book.\r\n" for i in range(100))
    (tmp_path / "book.txt").write_text(text, "utf-8", newline="")
    found, report = read(FilesSource(tmp_path))
    assert "".join(part for _, part in found) == text[1:].replace("\r\n", "\n")
    assert [key for key, _ in found] == [f"book.txt[{i}]" for i in range(len(found))]
    assert all(part.endswith(".\n") for _, part in found)
    assert ("book.txt", "longer than 1k characters, split into several documents") in notes(report)
    assert skips(report) == {} and report.consumed == (tmp_path / "book.txt").stat().st_size


@pytest.mark.parametrize(
    ("data", "reason", "where"),
    [(b"\xff", "not UTF-8 text", "byte 2700 (0xff)"), (b"\0", "binary (holds a NUL byte)", "byte 2700")],
)
def test_a_long_file_that_turns_bad_keeps_what_came_before(data, reason, where, tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "MAX_DOCUMENT_CHARS", 1000)
    monkeypatch.setattr(documents, "PART_CHARS", 100)
    monkeypatch.setattr(readers, "CHUNK", 64)
    (tmp_path / "a.txt").write_bytes("nine é:\n".encode() * 300 + data + b"more")
    found, report = read(FilesSource(tmp_path))
    assert 2000 < sum(len(text) for _, text in found) < 2400
    assert skips(report) == {("a.txt", reason): [where]}


@pytest.mark.parametrize(
    ("wanted", "columns", "found"),
    [
        (None, {"content": True, "text": True}, "text"),
        (None, {"url": True, "content": True}, "content"),
        (None, {"n": False, "body": True}, "body"),
        (None, {"text": False, "body": True}, "body"),
        ("url", {"url": True, "text": True}, "url"),
    ],
)
def test_the_text_column_is_found(wanted, columns, found):
    entry = FileReport("x")
    assert find_text_column(wanted, columns, entry) == found
    is_noted = wanted is None and found != "text"
    assert list(entry.notes) == [f"without column 'text', text read from {found!r}"] * is_noted


@pytest.mark.parametrize(
    ("wanted", "columns", "reason", "fix"),
    [
        (None, {"prompt": True, "answer": True}, "no text column found among prompt, answer", "with --text-field"),
        (None, {"n": False}, "no text column found among n", "with --text-field"),
        (None, {"input_ids": False, "labels": False}, "among input_ids, labels", "read token ids with --from-tokens"),
        ("body", {"text": True}, "no column 'body' among text", "with --text-field"),
        ("n", {"n": False, "text": True}, "column 'n' does not hold strings", "another with --text-field"),
    ],
)
def test_a_column_that_is_not_clear_is_asked_for(wanted, columns, reason, fix):
    with pytest.raises(Unreadable, match=re.escape(reason)) as caught:
        find_text_column(wanted, columns, FileReport("x"))
    assert fix in caught.value.fix


# VmHWM and not getrusage: a process begins with the ru_maxrss of the one that started it. A warm-up on a small file first, so that
# only what the long line adds counts. At last the same in one piece, which shows that the measure sees the line.
SCRIPT = """
import re, sys
from pathlib import Path
from boost.data import byte_streams, documents, json_text, readers
from boost.data.report import PrepareReport
from boost.data.sources import FilesSource

small, large, limit = *sys.argv[1:3], int(sys.argv[3])

def set_limits(limit):
    documents.MAX_DOCUMENT_CHARS = json_text.MAX_LINE_BYTES = limit
    documents.PART_CHARS = byte_streams.CHUNK = json_text.CHUNK = readers.CHUNK = min(limit // 16, 1 << 20)

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

def read(path):
    report = PrepareReport()
    length = sum(len(document.text) for document in FilesSource(path).documents(report))
    assert not report.sources[0].files[0].skipped, report.summary()
    return length

set_limits(limit)
read(small)
before = peak()
length = read(large)
added = peak() - before
set_limits(1 << 30)
read(large)
print(length, added, peak() - before)
"""


def peak_of_line(folder: Path, suffix: str, size: int, limit: int) -> tuple[int, int, int]:
    """Characters read from a file with one line of `size` bytes; bytes that reading it added to a process's peak, with the limit
    and without."""
    for name, length in (("small", 1000), ("large", size)):
        with open(folder / f"{name}{suffix}", "wb") as file:
            file.write(b'{"url": ["a", {"b": 1}], "text": "' if suffix == ".jsonl" else b"")
            for _ in range(length // 1000):
                file.write((b"twenty letters here" + (b"\\n" if suffix == ".jsonl" else b" ")) * 50)
            file.write(b'"}' if suffix == ".jsonl" else b"")
    words = [sys.executable, "-c", SCRIPT, folder / f"small{suffix}", folder / f"large{suffix}", limit]
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    length, streamed, at_once = map(int, done.stdout.split())
    return length, streamed, at_once


needs_proc = pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="the peak is read from Linux's /proc")


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".jsonl", ".txt"])
def test_a_long_line_takes_bounded_memory(suffix, tmp_path):
    length, streamed, at_once = peak_of_line(tmp_path, suffix, 20_000_000, 1 << 20)
    assert length == 20_000_000
    assert streamed < 10_000_000 < 40_000_000 < at_once


@needs_proc
@pytest.mark.nightly
@pytest.mark.parametrize("suffix", [".jsonl", ".txt"])
def test_a_line_of_200_mb_takes_bounded_memory(suffix, tmp_path):
    length, streamed, at_once = peak_of_line(tmp_path, suffix, 200_000_000, 16_000_000)
    assert length == 200_000_000
    assert streamed < 100_000_000 < 400_000_000 < at_once
