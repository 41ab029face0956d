"""Compressed files and other encodings: read as what they hold, or reported with the reason and the fix."""

import codecs
import gzip
import os

import pytest

from boost.data import byte_streams
from boost.data.sources import FilesSource
from boost.errors import DataError
from tests.data.inputs import compressed, notes, read, skips

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
    with pytest.raises(DataError, match=rf"a\.jsonl{suffix}: damaged {NAMES[suffix]} file.*; copy it again"):
        read(FilesSource(path))


def test_damage_in_the_middle_keeps_what_came_before(tmp_path):
    lines = b"".join(b'{"text": "%s"}\n' % os.urandom(50).hex().encode() for _ in range(50_000))
    data = bytearray(gzip.compress(lines))
    data[len(data) // 2 : len(data) // 2 + 64] = bytes(64)
    (tmp_path / "a.jsonl.gz").write_bytes(data)
    documents, report = read(FilesSource(tmp_path))
    assert 10_000 < len(documents) < 40_000
    assert ("a.jsonl.gz", "damaged gzip file") in skips(report)


def test_several_zstd_frames_are_one_file(tmp_path):
    path = compressed(tmp_path / "a.txt.zst", b"one ")
    path.write_bytes(path.read_bytes() + compressed(tmp_path / "b.zst", b"two").read_bytes())
    assert read(FilesSource(path))[0] == [("a.txt.zst", "one two")]


def test_zstd_with_a_long_window_names_the_command(tmp_path):
    """A frame header with a window of 2 GB (window descriptor: exponent 21 above 2^10), as `zstd --long=31` writes it."""
    (tmp_path / "a.txt.zst").write_bytes(bytes.fromhex("28b52ffd00") + bytes([21 << 3]) + b"\x01\0\0")
    with pytest.raises(DataError, match=r"window above 128 MB; decompress it first: zstd -d --long=31 a\.txt\.zst"):
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
    monkeypatch.setattr(byte_streams, "CHUNK", 64)  # so that characters lie across chunks
    # Without a byte order mark, the first hundred characters must be Latin.
    text = "Some text. " * 10 + "é \N{SNOWMAN} \N{GRINNING FACE}\n" * 20
    record = '{"text": "é"}\n' * 12 + '{"text": "\N{GRINNING FACE}"}\n'
    for name, content in {"a.txt": text, "b.jsonl": record, "c.csv": "n,text\n1,é\n"}.items():
        codec, mark = ("utf-16-be", codecs.BOM_UTF16_BE) if encoding == "bom-16-be" else (encoding, b"")
        (tmp_path / name).write_bytes(mark + content.encode(codec))
    documents, report = read(FilesSource(tmp_path))
    assert [text for _, text in documents] == [text, *"é" * 12, "\N{GRINNING FACE}", "é"]
    noted = f"{ENCODINGS[encoding]} text, converted to UTF-8"
    assert notes(report) == {(name, noted): [] for name in ("a.txt", "b.jsonl", "c.csv")}
    assert skips(report) == {}


def test_utf8_byte_order_marks_are_left_out(tmp_path):
    for name, content in {
        "a.txt": "é",
        "b.jsonl": '{"text": "é"}\n',
        "c.csv": "text,n\né,1\n",
        "d.json": '[{"text": "é"}]',
    }.items():
        (tmp_path / name).write_bytes(codecs.BOM_UTF8 + content.encode())
    documents, report = read(FilesSource(tmp_path))
    assert [text for _, text in documents] == ["é"] * 4 and skips(report) == {}


def test_binary_data_is_not_taken_for_utf16(tmp_path):
    (tmp_path / "ids.dat").write_bytes(b"\x05\0\x06\0\x07\0" * 100)
    (tmp_path / "odd.txt").write_bytes(("text" * 50).encode("utf-16-le") + b"\0\xd8")
    documents, report = read(FilesSource(tmp_path))
    assert documents == []
    assert skips(report) == {
        ("ids.dat", "binary (holds a NUL byte)"): ["byte 1"],
        ("odd.txt", "damaged UTF-16 text"): ["byte 400"],
    }
