"""Converts files to documents by suffix: text, JSON, Parquet and Arrow, plain or compressed. No input is ever executed.

A problem with a whole file raises `Unreadable`; the caller either ends the run (if the user named that file) or records it
in the report (if the file is in a folder). A problem with one line or row is recorded in the report directly. Documents that
precede the damage in a file are kept.
"""

import bz2
import codecs
import gzip
import importlib
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from types import ModuleType
from typing import IO, TYPE_CHECKING, Any

from boost.data.report import FileReport, PrepareReport
from boost.errors import DataError
from boost.format import format_bytes, format_count
from boost.text import foreign_encoding

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

# Longer text is split into several documents, all of which are kept. A document of 1M characters is longer than any context
# window, so the added boundaries barely affect training.
MAX_DOCUMENT_CHARS = 16_000_000
PART_CHARS = 1_000_000
MAX_RECORD_BYTES = 1 << 26
"""Limit for a JSON line, which is parsed as a whole. Longer lines are skipped."""
MAX_JSON_BYTES = 1 << 30
"""Limit for a JSON array, which is also parsed as a whole."""
CHUNK = 1 << 20
"""Bytes to read at a time."""

NOT_UTF8 = "not UTF-8 text"
LFS = b"version https://git-lfs.github.com/spec/"
"""What a file begins with in a clone without its content."""
SURROGATE = "not valid Unicode (half of a surrogate pair)"
CRLF = "with CRLF line breaks, normalized to LF"

_COMPRESSION = {".gz": "gzip", ".zst": "zstd", ".bz2": "bzip2", ".xz": "xz"}


def with_compression(*suffixes: str) -> tuple[str, ...]:
    """The suffixes of plain and of compressed files."""
    return tuple(f"{suffix}{packed}" for suffix in suffixes for packed in ("", *_COMPRESSION))


JSON_SUFFIXES = with_compression(".jsonl", ".jsonlines", ".ndjson", ".json")


class Unreadable(Exception):
    """Why a file cannot be read, where in the file, and how to fix it. `documents`: counts those that are skipped with the file."""

    def __init__(
        self,
        reason: str,
        where: str = "",
        fix: str = "remove it from the inputs",
        documents: Callable[[], int] = lambda: 1,
    ) -> None:
        joint = " at " if where.startswith(("byte ", "line ")) else ": "
        super().__init__(f"{reason}{joint}{where}; {fix}" if where else f"{reason}; {fix}")
        self.reason, self.where, self.documents = reason, where, documents


@dataclass(frozen=True, slots=True)
class Document:
    """A text whose tokens attend only to each other. `key` identifies it and determines its split; `entry`: its file's report."""

    key: str
    text: str
    entry: FileReport
    split: str | None = None
    """The split to which its source belongs; None: `boost.data.split` decides."""


def read_text(path: Path, key: str, entry: FileReport, report: PrepareReport) -> Iterator[Document]:
    """A plain text, in several documents if it is long."""
    with open_utf8(path, entry, report) as file:
        yield from accept_pieces(_decoded(file), key, "", entry)


# ---- Text in every format: what is skipped, how line breaks are normalized, where long text is split


def accept(text: object, key: str, where: str, entry: FileReport) -> Document | None:
    """Returns a document for the text, or returns None and records the reason in the report."""
    if not isinstance(text, str):
        entry.skip("with a text field that is not a string", f"{where}: {type(text).__name__}".removeprefix(": "))
        return None
    if not text or text.isspace():
        entry.skip("empty", where)
        return None
    if "\r\n" in text:
        text = text.replace("\r\n", "\n")
        entry.note(CRLF, where)
    try:
        entry.take(len(text.encode("utf-8")))
    except UnicodeEncodeError as error:
        entry.skip(SURROGATE, f"{where}: character {error.start}".removeprefix(": "))
        return None
    return Document(key, text, entry)


def accept_pieces(pieces: Iterable[Any], key: str, where: str, entry: FileReport) -> Iterator[Document]:
    """Like `accept`, for a text in consecutive pieces. A long text becomes several documents, and is never in memory as a whole."""
    iterator, head, length = iter(pieces), [], 0
    for piece in iterator:
        head.append(piece)
        length += len(piece) if isinstance(piece, str) else 0
        if length > MAX_DOCUMENT_CHARS:
            break
    if length <= MAX_DOCUMENT_CHARS:
        if document := accept("".join(head) if length else head[0], key, where, entry):
            yield document
        return
    entry.note(f"longer than {format_count(MAX_DOCUMENT_CHARS)} characters, split into several documents", where)
    for number, part in enumerate(split_long(chain(head, iterator))):
        if document := accept(part, f"{key}[{number}]", f"{where}, part {number}".removeprefix(", "), entry):
            yield document


def split_long(pieces: Iterable[str]) -> Iterator[str]:
    """Splits a text into parts of at most `PART_CHARS` characters: after a paragraph, a line or a word if possible."""
    buffer = ""
    for piece in pieces:
        buffer += piece
        start = 0
        while len(buffer) - start > PART_CHARS:
            window = buffer[start : start + PART_CHARS]
            for mark in ("\n\n", "\n", " "):
                if (at := window.rfind(mark, len(window) // 2)) >= 0:
                    end = at + len(mark)
                    break
            else:
                # Do not split a CRLF or, in malformed text, a surrogate pair.
                end = len(window) - (len(window) > 1 and (window[-1] == "\r" or "\ud800" <= window[-1] <= "\udbff"))
            yield buffer[start : start + end]
            start += end
        buffer = buffer[start:]
    if buffer:
        yield buffer


def find_text_column(
    wanted: str | None, columns: dict[str, bool], entry: FileReport, documents: Callable[[], int] = lambda: 1
) -> str:
    """The column with the text: `wanted`; else `text` or `content`; else the only one that holds strings.

    `columns`: whether each column holds strings, by name. Raises `Unreadable`, naming the columns, if none or several match; all
    `documents` then count as skipped.
    """
    strings = [name for name, is_string in columns.items() if is_string]
    names = ", ".join(list(columns)[:20]) or "no columns"
    if wanted is not None:
        if wanted not in columns:
            raise Unreadable(f"no column {wanted!r} among {names}", "", "choose one with --text-field", documents)
        if wanted not in strings:
            problem = f"column {wanted!r} does not hold strings"
            raise Unreadable(problem, "", "choose another with --text-field", documents)
        return wanted
    usual = [name for name in ("text", "content") if name in strings]
    if not usual and len(strings) != 1:
        raise Unreadable(f"no text column found among {names}", "", "choose one with --text-field", documents)
    chosen = (usual or strings)[0]
    if chosen != "text":
        entry.note(f"read from column {chosen!r}, because the file has no 'text' column of strings")
    return chosen


def note_unread(entry: FileReport, names: Iterable[str]) -> None:
    """Notes the columns or fields whose text is not read."""
    if names := sorted(names):
        more = f" and {len(names) - 20} more" if len(names) > 20 else ""
        entry.note(f"with unread columns: {', '.join(names[:20])}{more}")


# ---- Bytes: decompressed by suffix, transcoded from UTF-16 and UTF-32


@contextmanager
def open_utf8(path: Path, entry: FileReport, report: PrepareReport) -> Iterator[io.BufferedReader]:
    """Opens a file for reading; keeps a UTF-8 byte order mark. If the file is transcoded, `entry` records this.

    Raises `Unreadable` for a damaged compressed file, here or in the body of the `with` statement.
    """
    compression = _COMPRESSION.get(path.suffix.lower(), "")
    try:
        with _Counted(path, report) as counted:
            match compression:
                case "gzip":
                    opened: io.RawIOBase | io.BufferedIOBase = gzip.GzipFile(fileobj=counted)
                case "bzip2":
                    opened = bz2.BZ2File(counted)
                case "xz":
                    opened = _Pieces(_xz_streams(counted))
                case "zstd":
                    opened = require("pyarrow", "zstd files").CompressedInputStream(counted, "zstd")
                case _:
                    opened = counted
            file: io.BufferedReader = io.BufferedReader(opened, CHUNK)
            if file.peek(len(LFS))[: len(LFS)] == LFS:
                raise Unreadable("a Git LFS pointer, not the file itself", fix="download it: git lfs pull")
            if encoding := _foreign_codec(file.peek(200)[:200]):
                entry.note(f"encoded in {encoding.upper()[:6]}, converted to UTF-8")
                file = io.BufferedReader(_Pieces(text.encode() for text in _decoded(file, encoding)), CHUNK)
            yield file
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        where = "truncated" if isinstance(error, EOFError) else str(error)
        raise Unreadable(f"damaged {compression} file", where, "copy the file again") from error
    except OSError as error:
        if error.errno is not None or not compression:
            raise  # a file system error, not a decompression error
        if "too much memory" in str(error):
            fix = f"decompress it first: zstd -d --long=31 {path.name}"
            raise Unreadable("zstd file with a window above 128 MB", fix=fix) from error
        raise Unreadable(f"damaged {compression} file", str(error).splitlines()[0], "copy the file again") from error


class _Counted(io.FileIO):
    """A file whose reads advance the progress bar."""

    def __init__(self, path: Path, report: PrepareReport) -> None:
        super().__init__(path)
        self._report = report

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(-1 if size is None else size)
        self._report.consumed += len(data)
        return data

    def readinto(self, buffer: "WriteableBuffer") -> int:
        count = super().readinto(buffer)
        self._report.consumed += count
        return count


class _Pieces(io.RawIOBase):
    """A file whose content comes in pieces."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._ready = pieces, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        while not self._ready:
            if (piece := next(self._pieces, None)) is None:
                return 0
            self._ready = piece
        view = memoryview(buffer)
        count = min(len(view), len(self._ready))
        view[:count], self._ready = self._ready[:count], self._ready[count:]
        return count


def _xz_streams(file: io.RawIOBase) -> Iterator[bytes]:
    """The content of xz streams one after another, with padding between and after them, which `lzma.LZMAFile` takes for damage or
    for the end."""
    decompressor: lzma.LZMADecompressor | None = lzma.LZMADecompressor()
    rest = b""
    while rest := rest or file.read(CHUNK):
        if decompressor is None:
            rest = rest.lstrip(b"\0")
            decompressor = lzma.LZMADecompressor() if rest else None
            continue
        yield decompressor.decompress(rest, CHUNK)
        while not (decompressor.needs_input or decompressor.eof):
            yield decompressor.decompress(b"", CHUNK)
        rest, decompressor = (decompressor.unused_data, None) if decompressor.eof else (b"", decompressor)
    if decompressor is not None:
        raise EOFError


def _foreign_codec(head: bytes) -> str | None:
    """The codec of text that begins with `head`, if it is UTF-16 or UTF-32; else None."""
    encoding = foreign_encoding(head)
    if encoding is None:
        return None
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)):
        return encoding.lower()
    # Without a byte order mark, an array of small integers looks like UTF-16, except that it contains control characters.
    codec = "utf-16-le" if head[1] == 0 else "utf-16-be"
    sample = head[: len(head) // 2 * 2].decode(codec, "replace")
    return codec if all(c.isprintable() or c.isspace() for c in sample) else None


def _decoded(file: IO[bytes], encoding: str = "utf-8") -> Iterator[str]:
    """The text of a file in pieces, without a byte order mark. Raises `Unreadable` with the offset of the first bad byte."""
    decoder, offset, data = codecs.getincrementaldecoder(encoding)(), 0, b"begin"
    while data:
        data = file.read(CHUNK)
        if encoding == "utf-8" and (nul := data.find(b"\0")) >= 0:
            raise Unreadable("binary (holds a NUL byte)", f"byte {offset + nul}")
        try:
            text = decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            # The decoder's input includes the incomplete character that ended the previous chunk.
            where = f"byte {offset - (len(error.object) - len(data)) + error.start}"
            if encoding != "utf-8":
                raise Unreadable(f"damaged {encoding.upper()[:6]} text", where, "save it as UTF-8") from error
            where += f" (0x{error.object[error.start]:02x})"
            raise Unreadable(NOT_UTF8, where, "convert it, e.g. with 'iconv -f latin1 -t utf-8'") from None
        yield text if offset else text.removeprefix("\ufeff")
        offset += len(data)


# ---- JSON: lines, so that one bad line does not end the file; or one array


def _json_records(
    path: Path, text_fields: Sequence[str], entry: FileReport, report: PrepareReport
) -> Iterator[tuple[int, str, object]]:
    """Yields (number from 1, description of the position, value) for each record in a JSON file. If the file is one object without
    text that wraps a list of records, as in {"version": ..., "data": [...]}, reads that list. Raises `Unreadable`."""
    found = _json_values(path, entry, report)
    first = list(islice(found, 2)) if ".json" in map(str.lower, path.suffixes[-2:]) else []
    value = first[0][2] if len(first) == 1 else None
    if isinstance(value, dict) and not any(isinstance(value.get(name), str) for name in text_fields):
        lists = [
            name for name, items in value.items() if isinstance(items, list) and items and isinstance(items[0], dict)
        ]
        if len(lists) > 1:
            fix = f"write one of them as a list of its own, e.g. with: jq .{lists[0]}"
            raise Unreadable(f"one object with several lists of records: {', '.join(lists[:20])}", fix=fix)
        if lists:
            entry.note(f"read from the list in field {lists[0]!r} of one JSON object")
            note_unread(entry, value.keys() - {lists[0]})
            yield from ((number, f"record {number}", item) for number, item in enumerate(value[lists[0]], start=1))
            return
    yield from chain(first, found)


def _json_values(path: Path, entry: FileReport, report: PrepareReport) -> Iterator[tuple[int, str, object]]:
    """The values in a file of JSON lines, or in an array. Bad lines are skipped and reported."""
    with open_utf8(path, entry, report) as file:
        head = bytes(file.peek(CHUNK)).removeprefix(codecs.BOM_UTF8).lstrip()
        is_whole = head.startswith(b"[") or head.partition(b"\n")[0].strip() == b"{"
        name = path.stem if path.suffix.lower() in _COMPRESSION else path.name
        if is_whole and name.lower().endswith(".json"):
            for number, value in enumerate(_whole_json(file), start=1):
                yield number, f"record {number}", value
            return
        number = 0
        while line := file.readline(MAX_RECORD_BYTES + 1):
            number += 1
            where = f"line {number}"
            if len(line) > MAX_RECORD_BYTES and not line.endswith(b"\n"):
                while not line.endswith(b"\n") and (line := file.readline(CHUNK)):
                    pass
                entry.skip(f"longer than {format_bytes(MAX_RECORD_BYTES)}", where)
            elif not line.strip():
                entry.skip("blank line", where)
            else:
                try:
                    value = json.loads(line.decode("utf-8-sig").strip())
                except UnicodeDecodeError as error:
                    entry.skip(NOT_UTF8, f"{where}, byte {error.start}")
                except (ValueError, RecursionError) as error:
                    # The decoder's own message says "line 1", which would be misleading here.
                    position = isinstance(error, json.JSONDecodeError) and f"{error.msg}, column {error.colno}"
                    entry.skip("not valid JSON", f"{where}: {position or error}")
                else:
                    yield number, where, value


def _whole_json(file: IO[bytes]) -> list[object]:
    """Returns the elements of a JSON array, or a list with one value. Raises `Unreadable`.

    `datasets` infers a type per column of an array, and so changes values: dates in text, digits of numbers, text among lists.
    """
    data = file.read(MAX_JSON_BYTES + 1)
    if len(data) > MAX_JSON_BYTES:
        reason = f"JSON longer than {format_bytes(MAX_JSON_BYTES)}"
        raise Unreadable(reason, fix="convert it to JSON Lines, e.g. with: jq -c '.[]'")
    try:
        value = json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise Unreadable(NOT_UTF8, f"byte {error.start}", "save it as UTF-8") from error
    except json.JSONDecodeError as error:
        raise Unreadable("not JSON", f"line {error.lineno}, column {error.colno}: {error.msg}", "correct it") from None
    except (ValueError, RecursionError) as error:  # an integer with more digits than Python parses
        where = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise Unreadable("not JSON", where, "correct it") from None
    return value if isinstance(value, list) else [value]


def read_json(
    path: Path, key: str, text_field: str | None, entry: FileReport, report: PrepareReport
) -> Iterator[Document]:
    records = partial(_json_records, path, [text_field] if text_field else ["text", "content"])
    field = text_field or "text"  # records without it are skipped one by one
    if text_field is None:
        fields: dict[str, bool] = {}
        with suppress(Unreadable):  # a damaged file is read up to the damage
            for _, _, record in islice(records(FileReport(""), PrepareReport()), 100):
                for name, value in record.items() if isinstance(record, dict) else ():
                    fields[name] = fields.get(name, False) or isinstance(value, str)
        if fields:
            everything = records(FileReport(""), PrepareReport())
            field = find_text_column(None, fields, entry, lambda: sum(1 for _ in everything))
    unread, is_strings = set[str](), False
    for number, where, record in records(entry, report):
        if isinstance(record, dict) and field in record:
            if len(record) > 1:
                unread.update(record)
            yield from accept_pieces([record[field]], f"{key}:{number}", where, entry)
        elif isinstance(record, str) and (is_strings := is_strings or where == "record 1") and field == "text":
            yield from accept_pieces([record], f"{key}:{number}", where, entry)
        else:
            what = ", ".join(list(record)[:8]) if isinstance(record, dict) else type(record).__name__
            entry.skip(f"without the field {field!r}", f"{where} has {what}")
    note_unread(entry, unread - {field})


def require(module: str, what: str) -> ModuleType:
    """Imports a module from an optional package. Raises `DataError` with the install command if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise DataError(f"reading {what} needs the package {package!r}: pip install {package}") from error
