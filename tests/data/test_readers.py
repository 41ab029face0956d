"""Files of every format: what is read, and the report of everything else."""

import codecs
import gzip
import json
import lzma
import os
import re
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from boost.data import readers
from boost.data.readers import Unreadable, find_text_column, split_long
from boost.data.report import FileReport, PrepareReport
from boost.data.sources import FilesSource
from boost.errors import DataError
from tests.data.inputs import compressed, notes, read, skips
from tests.peaks import in_new_process, needs_proc, peak


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
        patch.setattr(readers, "PART_CHARS", limit)
        parts = list(split_long(pieces))
    assert "".join(parts) == "".join(pieces)
    assert all(0 < len(part) <= limit for part in parts)
    assert not any(a.endswith("\r") and b.startswith("\n") and len(a) > 1 for a, b in pairwise(parts))


def test_a_long_text_file_becomes_documents_and_nothing_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "MAX_DOCUMENT_CHARS", 1000)
    monkeypatch.setattr(readers, "PART_CHARS", 100)
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
    monkeypatch.setattr(readers, "MAX_DOCUMENT_CHARS", 1000)
    monkeypatch.setattr(readers, "PART_CHARS", 100)
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
    note = f"read from column {found!r}, because the file has no 'text' column of strings"
    assert list(entry.notes) == [note] * is_noted


@pytest.mark.parametrize(
    ("wanted", "columns", "reason", "fix"),
    [
        (None, {"prompt": True, "answer": True}, "no text column found among prompt, answer", "with --text-field"),
        (None, {"n": False}, "no text column found among n", "with --text-field"),
        ("body", {"text": True}, "no column 'body' among text", "with --text-field"),
        ("n", {"n": False, "text": True}, "column 'n' does not hold strings", "another with --text-field"),
    ],
)
def test_a_column_that_is_not_clear_is_asked_for(wanted, columns, reason, fix):
    with pytest.raises(Unreadable, match=re.escape(reason)) as caught:
        find_text_column(wanted, columns, FileReport("x"))
    assert fix in str(caught.value)


def peak_of_line(folder: Path, limit: int) -> int:
    """Prints the characters of a file with one line, and the bytes that reading it adds to the peak, with the limit and without."""
    for name, words in (("small", 50), ("large", 1_000_000)):
        (folder / f"{name}.txt").write_bytes(b"twenty letters here " * words)

    def read_of(name: str, limit: int) -> int:
        readers.MAX_DOCUMENT_CHARS = limit
        readers.PART_CHARS = readers.CHUNK = min(limit // 16, 1 << 20)
        report = PrepareReport()
        return sum(len(each.text) for each in FilesSource(folder / f"{name}.txt").documents(report))

    read_of("small", limit)  # only what the long line adds counts
    before = peak()
    length = read_of("large", limit)
    added = peak() - before
    read_of("large", 1 << 30)  # in one piece, which shows that the measure sees the line
    print(length, added, peak() - before)
    return 0


@needs_proc
def test_a_long_line_takes_bounded_memory(tmp_path):
    length, streamed, at_once = in_new_process(peak_of_line, tmp_path, 1 << 20)
    assert length == 20_000_000
    assert streamed < 10_000_000 < 40_000_000 < at_once


NAMES = {".gz": "gzip", ".zst": "zstd", ".bz2": "bzip2", ".xz": "xz"}


@pytest.mark.parametrize("suffix", NAMES)
def test_compressed_text_and_json(suffix, tmp_path):
    compressed(tmp_path / f"a.jsonl{suffix}", b'{"text": "first"}\n{"text": "second"}\n')
    compressed(tmp_path / f"b.txt{suffix}", "plain \N{SNOWMAN}".encode())
    documents, report = read(FilesSource(tmp_path))
    assert documents == [
        (f"a.jsonl{suffix}:1", "first"),
        (f"a.jsonl{suffix}:2", "second"),
        (f"b.txt{suffix}", "plain \N{SNOWMAN}"),
    ]
    assert report.consumed == sum(path.stat().st_size for path in tmp_path.iterdir())


@pytest.mark.parametrize("suffix", NAMES)
@pytest.mark.parametrize("keep", [slice(0, 20), slice(5, None)], ids=["truncated", "no header"])
def test_damaged_compressed_files(suffix, keep, tmp_path):
    path = compressed(tmp_path / f"a.jsonl{suffix}", b'{"text": "first"}\n' * 50)
    path.write_bytes(path.read_bytes()[keep])
    (tmp_path / "b.txt").write_text("b")
    documents, report = read(FilesSource(tmp_path))
    assert documents == [("b.txt", "b")]
    assert list(skips(report)) == [(path.name, f"damaged {NAMES[suffix]} file")]
    with pytest.raises(DataError, match=rf"a\.jsonl{suffix}: damaged {NAMES[suffix]} file"):
        read(FilesSource(path))


def test_damage_in_the_middle_keeps_what_came_before(tmp_path):
    lines = b"".join(b'{"text": "%s"}\n' % os.urandom(50).hex().encode() for _ in range(50_000))
    data = bytearray(gzip.compress(lines))
    data[len(data) // 2 : len(data) // 2 + 64] = bytes(64)
    (tmp_path / "a.jsonl.gz").write_bytes(data)
    documents, report = read(FilesSource(tmp_path))
    assert 10_000 < len(documents) < 40_000
    assert ("a.jsonl.gz", "damaged gzip file") in skips(report)


def test_xz_streams_with_padding(tmp_path):
    """As `xz` and `tar` write and read them: several streams, zeros between and after them."""
    parts = [lzma.compress(text) for text in (b"one ", b"two ", b"x" * 100_000)]
    for name, padded in {
        "a.txt.xz": b"".join(parts),
        "b.txt.xz": bytes(4).join(parts) + bytes(8),
        "c.txt.xz": parts[0] + bytes(1 << 21) + parts[1],
        "d.txt.xz": parts[0] + bytes(4) + b"not xz",
        "e.txt.xz": parts[0] + bytes(4) + parts[1][:-9],
    }.items():
        (tmp_path / name).write_bytes(padded)
    found, report = read(FilesSource(tmp_path))
    assert found == [(f"{n}.txt.xz", "one two " + "x" * 100_000) for n in "ab"] + [("c.txt.xz", "one two ")]
    assert list(skips(report)) == [("d.txt.xz", "damaged xz file"), ("e.txt.xz", "damaged xz file")]


def test_zstd_with_a_long_window_names_the_command(tmp_path):
    """A frame header with a window of 2 GB (window descriptor: exponent 21 above 2^10), as `zstd --long=31` writes it."""
    (tmp_path / "a.txt.zst").write_bytes(bytes.fromhex("28b52ffd00") + bytes([21 << 3]) + b"\x01\0\0")
    with pytest.raises(DataError, match=r"window above 128 MB; .*: zstd -d --long=31 a\.txt\.zst"):
        read(FilesSource(tmp_path / "a.txt.zst"))


ENCODINGS = {
    "utf-16": "UTF-16",
    "utf-16-le": "UTF-16",
    "utf-16-be": "UTF-16",
    "utf-32": "UTF-32",
    "bom-16-be": "UTF-16",
}


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_other_encodings_are_converted_and_noted(encoding, tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "CHUNK", 64)  # so that characters lie across chunks
    # Without a byte order mark, the first hundred characters must be Latin.
    text = "Some text. " * 10 + "é \N{SNOWMAN} \N{GRINNING FACE}\n" * 20
    record = '{"text": "é"}\n' * 12 + '{"text": "\N{GRINNING FACE}"}\n'
    for name, content in {"a.txt": text, "b.jsonl": record}.items():
        codec, mark = ("utf-16-be", codecs.BOM_UTF16_BE) if encoding == "bom-16-be" else (encoding, b"")
        (tmp_path / name).write_bytes(mark + content.encode(codec))
    documents, report = read(FilesSource(tmp_path))
    assert [text for _, text in documents] == [text, *"é" * 12, "\N{GRINNING FACE}"]
    noted = f"encoded in {ENCODINGS[encoding]}, converted to UTF-8"
    assert notes(report) == {(name, noted): [] for name in ("a.txt", "b.jsonl")}
    assert skips(report) == {}


def test_utf8_byte_order_marks_are_left_out(tmp_path):
    for name, content in {"a.txt": "é", "b.jsonl": '{"text": "é"}\n', "d.json": '[{"text": "é"}]'}.items():
        (tmp_path / name).write_bytes(codecs.BOM_UTF8 + content.encode())
    documents, report = read(FilesSource(tmp_path))
    assert [text for _, text in documents] == ["é"] * 3 and skips(report) == {}


def test_files_that_git_lfs_did_not_fetch_are_no_text(tmp_path):
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0a1b\nsize 12\n"
    names = ("a.txt", "b.jsonl", "d.parquet", "e.py")
    for name in names:
        (tmp_path / name).write_bytes(pointer)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "f.txt").write_text("version 2")
    for name in ("a.txt", "b.jsonl", "e.py"):
        (tmp_path / name).rename(tmp_path / "texts" / name)
    documents, report = read(FilesSource(tmp_path))
    assert documents == [("texts/f.txt", "version 2")]
    names = ("d.parquet", *(f"texts/{name}" for name in names if name != "d.parquet"))
    assert {*skips(report)} == {(name, "a Git LFS pointer, not the file itself") for name in names}
    with pytest.raises(DataError, match=r"a Git LFS pointer.*git lfs pull"):
        read(FilesSource(tmp_path / "texts" / "b.jsonl"))


def test_binary_data_is_not_taken_for_utf16(tmp_path):
    (tmp_path / "ids.dat").write_bytes(b"\x05\0\x06\0\x07\0" * 100)
    (tmp_path / "odd.txt").write_bytes(("text" * 50).encode("utf-16-le") + b"\0\xd8")
    documents, report = read(FilesSource(tmp_path))
    assert documents == []
    assert skips(report) == {
        ("ids.dat", "binary (holds a NUL byte)"): ["byte 1"],
        ("odd.txt", "damaged UTF-16 text"): ["byte 400"],
    }


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonlines", ".json.gz"])
def test_json_lines(tmp_path, suffix):
    lines = [
        b'{"text": "one", "n": 1}',
        b"",
        b'{"text": "cut',
        b'{"body": "other"}',
        b'["text"]',
        b'{"text": 5}',
        b'{"text": null}',
        b'{"text": ""}',
        b'{"text": "caf\xe9"}',
        b'{"text": "\\ud800 half"}',
        b'{"text": "' + b"long " * 100_000 + b'"}',
        b'{"text": "last, no newline"}',
    ]
    path = tmp_path / f"x{suffix}"
    data = b"\n".join(lines)
    path.write_bytes(gzip.compress(data) if suffix.endswith(".gz") else data)
    documents, report = read(FilesSource(path))
    assert [(key, len(text)) for key, text in documents] == [
        (f"{path.name}:1", 3), (f"{path.name}:11", 500_000), (f"{path.name}:12", 16)
    ]  # fmt: skip
    found = {reason: examples for (_, reason), examples in skips(report).items()}
    (broken,) = found.pop("not valid JSON")
    assert broken == "line 3: Unterminated string starting at, column 10"
    assert found == {
        "blank line": ["line 2"],
        "without the field 'text'": ["line 4 has body", "line 5 has list"],
        "with a text field that is not a string": ["line 6: int", "line 7: NoneType"],
        "empty": ["line 8"],
        "not UTF-8 text": ["line 9, byte 13"],
        "not valid Unicode (half of a surrogate pair)": ["line 10: character 0"],
    }
    assert report.consumed == path.stat().st_size


@pytest.mark.parametrize("suffix", [".jsonl", ".json.gz"])
def test_a_line_above_the_limit_is_reported_and_the_rest_is_read(suffix, tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "MAX_RECORD_BYTES", 100)
    monkeypatch.setattr(readers, "CHUNK", 7)
    fits = json.dumps({"text": "y" * 88})
    assert len(fits) == 100
    lines = ['{"text": "one"}', json.dumps({"text": "x" * 300}), fits, json.dumps({"text": "x" * 300})]
    compressed(tmp_path / f"x{suffix}", "\n".join(lines).encode())
    found, report = read(FilesSource(tmp_path))
    assert [text for _, text in found] == ["one", "y" * 88]
    assert skips(report) == {(f"x{suffix}", "longer than 100 B"): ["line 2", "line 4"]}


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("suffix", [".json", ".json.zst"])
def test_a_json_array_is_one_record_per_element(suffix, indent, tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "CHUNK", 64)
    records = [{"text": f"number {i} \N{GRINNING FACE}", "n": i} for i in range(40)] + [{"n": 3}, "text"]
    compressed(tmp_path / f"x{suffix}", json.dumps(records, indent=indent, ensure_ascii=False).encode())
    found, report = read(FilesSource(tmp_path))
    assert found == [(f"x{suffix}:{i + 1}", f"number {i} \N{GRINNING FACE}") for i in range(40)]
    assert skips(report) == {(f"x{suffix}", "without the field 'text'"): ["record 41 has n", "record 42 has str"]}


def test_a_pretty_printed_record(tmp_path):
    (tmp_path / "x.json").write_text(json.dumps({"text": "one", "marks": [{"at": 1}]}, indent=1))
    assert read(FilesSource(tmp_path))[0] == [("x.json:1", "one")]


def test_an_array_of_strings(tmp_path):
    (tmp_path / "x.json").write_text(json.dumps(["one", "two"]))
    for field in (None, "text"):
        assert read(FilesSource(tmp_path, field))[0] == [("x.json:1", "one"), ("x.json:2", "two")]


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("field", [None, "text"])
def test_an_object_that_wraps_the_records_is_read_by_its_list(indent, field, tmp_path):
    data = {"version": "v2.0", "tags": ["a"], "data": [{"text": "one", "n": 1}, {"n": 2}, {"text": "two"}]}
    (tmp_path / "x.json").write_text(json.dumps(data, indent=indent))
    found, report = read(FilesSource(tmp_path, field))
    assert found == [("x.json:1", "one"), ("x.json:3", "two")]
    assert skips(report) == {("x.json", "without the field 'text'"): ["record 2 has n"]}
    assert notes(report) == {
        ("x.json", "read from the list in field 'data' of one JSON object"): [],
        ("x.json", "with unread columns: n"): [],
        ("x.json", "with unread columns: tags, version"): [],
    }
    data["more"] = data["data"]
    (tmp_path / "x.json").write_text(json.dumps(data, indent=indent))
    with pytest.raises(DataError, match="one object with several lists of records: data, more"):
        read(FilesSource(tmp_path / "x.json", field))


DIGITS = "Exceeds the limit (4300 digits) for integer string conversion: value has 5000 digits; use "
DIGITS += "sys.set_int_max_str_digits() to increase the limit"


@pytest.mark.parametrize(
    ("tail", "reason", "where"),
    [
        ('{"text": oops}]', "not JSON", ["line 1, column 28: Expecting value"]),
        ('{"text": "two"', "not JSON", ["line 1, column 33: Expecting ',' delimiter"]),
        ("[" * 100_000, "not JSON", ["nested too deeply"]),
        ("1" * 5000 + "]", "not JSON", [DIGITS]),
        ('{"text": "two"}] {"text": "lost"}', "not JSON", ["line 1, column 36: Extra data"]),
        ('{"text": "' + "x" * 900 + '"}]', "JSON longer than 500 B", []),
    ],
)
def test_an_array_that_is_damaged_or_too_long_is_reported(tail, reason, where, tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "MAX_JSON_BYTES", 500 if "x" in tail else 1 << 20)
    (tmp_path / "x.json").write_text('[{"text": "one"}, ' + tail)
    found, report = read(FilesSource(tmp_path))
    assert found == [] and skips(report) == {("x.json", reason): where}


def test_the_text_field_is_found(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"n": 1}\nbroken\n{"body": "found", "n": 2}\n')
    found, report = read(FilesSource(tmp_path / "a.jsonl"))
    assert found == [("a.jsonl:3", "found")]
    note = "read from column 'body', because the file has no 'text' column of strings"
    assert notes(report) == {("a.jsonl", note): [], ("a.jsonl", "with unread columns: n"): []}


def write_parquet(path, **columns):
    pq.write_table(pa.table(columns), path, row_group_size=100)


def test_parquet_of_the_wrong_shape(tmp_path):
    write_parquet(tmp_path / "x.parquet", body=["a"], title=["b"], n=[1])
    with pytest.raises(DataError, match="column 'n' does not hold strings; .* --text-field"):
        read(FilesSource(tmp_path / "x.parquet", text_field="n"))
    (tmp_path / "x.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match="not a valid Parquet file"):
        read(FilesSource(tmp_path / "x.parquet"))
    _, report = read(FilesSource(tmp_path))
    assert ("x.parquet", "not a valid Parquet file") in skips(report)


def test_text_in_parquet_that_is_not_utf8_is_skipped_row_by_row(tmp_path):
    """pyarrow reads it without an error."""
    texts = pa.array([b"one", b"t\xffo", b"three"]).view(pa.string())
    write_parquet(tmp_path / "x.parquet", text=texts)
    documents, report = read(FilesSource(tmp_path / "x.parquet"))
    assert documents == [("x.parquet:0", "one"), ("x.parquet:2", "three")]
    assert skips(report) == {("x.parquet", "not UTF-8 text"): ["row 1"]}


def test_columns_of_one_name_are_refused(tmp_path):
    table = pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(table, tmp_path / "x.parquet")
    with pa.OSFile(str(tmp_path / "x.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    found, report = read(FilesSource(tmp_path))
    assert found == []
    assert [reason for _, reason in skips(report)] == ["not a valid Arrow file", "not a valid Parquet file"]
    with pytest.raises(DataError, match="several columns are named 'text'; rename all but one"):
        read(FilesSource(tmp_path / "x.parquet"))


def test_columns_of_one_name_that_nobody_reads_do_not_matter(tmp_path):
    pq.write_table(pa.table([["a"], [1], [2]], names=["text", "n", "n"]), tmp_path / "x.parquet")
    documents, report = read(FilesSource(tmp_path))
    assert documents == [("x.parquet:0", "a")] and skips(report) == {}


def test_damaged_parquet_keeps_what_came_before(tmp_path):
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"text": [os.urandom(99).hex() for _ in range(400)]}), path, row_group_size=100,
                   compression="zstd", write_page_checksum=True)  # fmt: skip
    start = pq.ParquetFile(path).metadata.row_group(2).column(0).data_page_offset
    data = bytearray(path.read_bytes())
    data[start : start + 400] = os.urandom(400)
    path.write_bytes(data)
    documents, report = read(FilesSource(tmp_path))
    assert len(documents) == 3 * 64, "whole batches of the 200 rows before the damage"
    assert ("x.parquet", "damaged Parquet file") in skips(report)


def table_files(folder, table):
    """The rows as a stream, as a file and as row groups."""
    with pa.OSFile(str(folder / "a.arrow"), "wb") as out, pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    with pa.OSFile(str(folder / "b.arrow"), "wb") as out, pa.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    pq.write_table(table, folder / "c.parquet", row_group_size=7)


def test_tables_are_read_row_by_row(tmp_path):
    texts: list[str | None] = [f"row {i}" for i in range(200)]
    texts[3], texts[4], texts[130] = None, "two\r\nlines", ""
    table_files(tmp_path, pa.table({"n": range(200), "body": pa.array(texts, pa.large_string())}))
    found, report = read(FilesSource(tmp_path))
    expected = [(i, "two\nlines" if i == 4 else f"row {i}") for i in range(200) if i not in (3, 130)]
    names = ("a.arrow", "b.arrow", "c.parquet")
    assert found == [(f"{name}:{i}", text) for name in names for i, text in expected]
    reasons = {"with a text field that is not a string": ["row 3: NoneType"], "empty": ["row 130"]}
    assert skips(report) == {(name, reason): rows for name in names for reason, rows in reasons.items()}
    assert any(name == "a.arrow" and "from column 'body'" in note for name, note in notes(report))
    assert {(name, "with unread columns: n") for name in names} <= notes(report).keys()
    assert report.consumed == sum(path.stat().st_size for path in tmp_path.iterdir())


@pytest.mark.parametrize("name", ["a.arrow", "b.arrow"])
def test_damaged_arrow_files(name, tmp_path):
    table_files(tmp_path, pa.table({"text": [f"row {i}" * 50 for i in range(20)]}))
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match=rf"{name}: (damaged|not a valid) Arrow file"):
        read(FilesSource(tmp_path / name))
    (tmp_path / name).write_bytes(b"something else entirely")
    with pytest.raises(DataError, match="not a valid Arrow file"):
        read(FilesSource(tmp_path / name))


@pytest.fixture
def saved(tmp_path, datasets):
    """A dataset saved by `datasets` with its splits: train in three shards, and test."""
    train = datasets.Dataset.from_dict({"story": [f"story {i}" for i in range(30)], "n": range(30)})
    test = datasets.Dataset.from_dict({"story": ["of the test"], "n": [0]})
    folder = tmp_path / "saved"
    datasets.DatasetDict(train=train, test=test).save_to_disk(str(folder), num_shards={"train": 3, "test": 1})
    return folder


def test_a_saved_dataset_is_its_train_split(saved):
    found, report = read(FilesSource(saved))
    assert [text for _, text in found] == [f"story {i}" for i in range(30)]
    assert skips(report) == {
        ("test", "not the train split; to read it, pass its folder"): [],
        ("dataset_dict.json", "metadata of a saved dataset"): [],
        ("train/dataset_info.json", "metadata of a saved dataset"): [],
        ("train/state.json", "metadata of a saved dataset"): [],
    }
    assert [text for _, text in read(FilesSource(saved / "test"))[0]] == ["of the test"]


def test_a_relative_path_to_a_saved_dataset(saved, monkeypatch):
    monkeypatch.chdir(saved.parent)
    for path, rows in (("saved", 30), ("saved/test", 1), (".", 30)):
        assert len(read(FilesSource(path))[0]) == rows


def test_a_saved_dataset_without_a_train_split_asks(tmp_path, saved, datasets):
    splits = datasets.load_from_disk(str(saved))
    datasets.DatasetDict(validation=splits["train"], test=splits["test"]).save_to_disk(str(tmp_path / "other"))
    with pytest.raises(DataError, match="has no train split; .*: test, validation"):
        FilesSource(tmp_path / "other")
    (saved / "train" / "state.json").unlink()
    with pytest.raises(DataError, match="saved: not a dataset .*: FileNotFoundError: No such file"):
        FilesSource(saved)


def test_saved_datasets_in_a_folder_of_other_files(saved, tmp_path, datasets):
    """The train split of each is read. Splits among the other files are those of their names."""
    (tmp_path / "corpus").mkdir()
    folder = saved.rename(tmp_path / "corpus" / "saved")
    rows = datasets.Dataset.from_dict({"story": ["of one split"]})
    rows.save_to_disk(str(tmp_path / "corpus" / "one"))
    datasets.DatasetDict(test=rows).save_to_disk(str(tmp_path / "corpus" / "untrained"))
    (tmp_path / "corpus" / "notes.jsonl").write_text('{"text": "from the notes"}\n')
    (tmp_path / "corpus" / "test.jsonl").write_text('{"text": "of the test"}\n')
    found, report = read(FilesSource(folder.parent))
    assert sorted(text for _, text in found) == sorted(
        ["from the notes", "of one split", *(f"story {i}" for i in range(30))]
    )
    named = dict(list(skips(report)))
    assert named["saved/test"] == "not the train split; to read it, pass its folder"
    assert named["test.jsonl"] == "in the split 'test', not in train"
    assert "untrained: this saved dataset has no train split" in named["untrained"]
    (folder / "train" / "state.json").unlink()
    found, report = read(FilesSource(folder.parent))
    assert len(found) == 2
    ((_, reason),) = [skip for skip in skips(report) if skip[0] == "saved"]
    assert reason.startswith(f"{folder}: not a dataset that 'datasets' can load")


def test_datasets_saved_under_the_names_of_splits(tmp_path, datasets):
    for name in ("train", "test"):
        datasets.Dataset.from_dict({"text": [f"of {name}"]}).save_to_disk(str(tmp_path / name))
    found, report = read(FilesSource(tmp_path))
    assert [text for _, text in found] == ["of train"]
    assert dict(list(skips(report)))["test/data-00000-of-00001.arrow"] == "in the split 'test', not in train"


def test_caches_and_older_shards_of_a_saved_dataset_are_not_its_rows(tmp_path, datasets):
    for shards in (4, 2):
        rows = datasets.Dataset.from_dict({"text": [f"row {i} of {shards}" for i in range(8)], "n": range(8)})
        rows.save_to_disk(str(tmp_path), num_shards=shards)
    rows = datasets.load_from_disk(str(tmp_path))
    rows.map(lambda row: {"text": row["text"].upper()})
    found, report = read(FilesSource(tmp_path))
    assert [text for _, text in found] == rows["text"][:]
    left_out = sorted(name for name, reason in skips(report) if reason == "not part of the saved dataset")
    assert left_out[0].startswith("cache-") and left_out[1:] == [f"data-0000{i}-of-00004.arrow" for i in range(4)]


def test_a_file_without_a_text_column_skips_all_of_its_rows(tmp_path):
    table = pa.table({"a": [f"a{i}" for i in range(7)], "b": [f"b{i}" for i in range(7)]})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=3)
    with pa.OSFile(str(tmp_path / "x.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table, max_chunksize=2)
    rows = tmp_path / "rows" / "x.jsonl"
    rows.parent.mkdir()
    rows.write_text("".join(f'{{"a": "a{i}", "b": "b{i}"}}\n' for i in range(7)))
    documents, report = read(FilesSource(tmp_path))
    assert documents == []
    (section,) = report.sources
    reason = "no text column found among a, b"
    assert {entry.name: entry.skipped[reason].count for entry in section.files} == {
        f"{name}": 7 for name in ("rows/x.jsonl", "x.arrow", "x.parquet")
    }


@pytest.mark.parametrize("name", ["x.csv", "x.TSV.gz"])
def test_tables_with_delimiters_are_no_text(name, tmp_path):
    (tmp_path / name).write_bytes(b"id,text\n1,a\n")
    with pytest.raises(DataError, match=r"a CSV file, .*; save it as Parquet: python -c 'import pandas; .*to_parquet"):
        read(FilesSource(tmp_path / name))
    (tmp_path / "a.txt").write_text("text")
    documents, report = read(FilesSource(tmp_path))
    assert documents == [("a.txt", "text")] and [named for named, _ in skips(report)] == [name]


def test_what_lies_with_tables_is_no_text(tmp_path):
    """Such as a license next to them, or in a folder above."""
    for name in ("LICENSE", "NOTES.md", "data/infos.json", "notes/a.txt", "notes/b.jsonl"):
        path = tmp_path / "set" / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text('{"text": "words"}')
    for name in ("a", "sub/b"):
        path = tmp_path / "set" / "data" / f"{name}.parquet"
        path.parent.mkdir(exist_ok=True)
        pq.write_table(pa.table({"text": [f"row of {name}"]}), path)
    documents, report = read(FilesSource(tmp_path))
    assert [text for _, text in documents] == ["row of a", "row of sub/b", '{"text": "words"}', "words"]
    assert {name for name, _ in skips(report)} == {f"set/{name}" for name in ("LICENSE", "NOTES.md", "data/infos.json")}
    assert {reason for _, reason in skips(report)} == {
        "not a table, but in a folder of tables; to read it, pass it by name"
    }
    assert [text for _, text in read(FilesSource(tmp_path / "set" / "LICENSE"))[0]] == ['{"text": "words"}']
