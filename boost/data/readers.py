"""Converts files to documents by suffix: text, JSON, CSV, Parquet and Arrow, plain or compressed. No input is ever executed.

A problem with a whole file raises `Unreadable`; the caller either ends the run (if the user named that file) or records it
in the report (if the file is in a folder). A problem with one line or row is recorded in the report directly. Documents that
precede the damage in a file are kept.
"""

import bz2
import codecs
import csv
import gzip
import importlib
import io
import json
import lzma
import re
import sys
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

from boost.config.text import foreign_encoding
from boost.data.report import FileReport, PrepareReport
from boost.errors import DataError
from boost.format import format_bytes, format_count

# Longer text is split into several documents, all of which are kept. A document of 1M characters is longer than any context
# window, so the added boundaries barely affect training.
MAX_DOCUMENT_CHARS = 16_000_000
PART_CHARS = 1_000_000
MAX_RECORD_BYTES = 1 << 26
"""Limit for a JSON line, which is parsed as a whole. Longer lines are skipped."""
MAX_JSON_BYTES = 1 << 30
"""Limit for a JSON array, and for `CSV_ROWS` rows of CSV, which are also parsed as a whole. Longer rows end their file."""
CSV_ROWS = 128
"""Number of CSV rows to parse at a time."""
CHUNK = 1 << 20
"""Bytes to read at a time."""

NOT_UTF8 = "not UTF-8 text"
SURROGATE = "not valid Unicode (half of a surrogate pair)"
CRLF = "with CRLF line breaks, normalized to LF"
_UNDECODED = re.compile(r"[\udc80-\udcff]")
"""Bytes that were not UTF-8, decoded with `surrogateescape`."""

# Formats whose loaders can run code. A text pickle (protocol 0) is valid ASCII, so it is rejected by name.
REFUSED_SUFFIXES = (".pkl", ".pickle", ".p", ".joblib", ".dill", ".npy", ".npz", ".pt", ".pth", ".ckpt", ".bin", ".idx")
_COMPRESSION = {".gz": "gzip", ".zst": "zstd", ".bz2": "bzip2", ".xz": "xz"}
JSON_SUFFIXES = tuple(f"{name}{packed}" for name in (".jsonl", ".ndjson", ".json") for packed in ("", *_COMPRESSION))
CSV_SUFFIXES = tuple(f"{name}{packed}" for name in (".csv", ".tsv") for packed in ("", *_COMPRESSION))
PARQUET_SUFFIXES = (".parquet",)
ARROW_SUFFIXES = (".arrow", ".feather")


class Unreadable(Exception):
    """Why a file cannot be read, where in the file, and how to fix it."""

    def __init__(self, reason: str, where: str = "", fix: str = "remove it from the inputs") -> None:
        joint = " at " if where.startswith(("byte ", "line ")) else ": "
        super().__init__(f"{reason}{joint}{where}; {fix}" if where else f"{reason}; {fix}")
        self.reason, self.where = reason, where
        self.documents = 1
        """Number of documents that are skipped with the file, if known."""


@dataclass(frozen=True, slots=True)
class Document:
    """A text whose tokens attend only to each other. `key` identifies it and determines its split; `entry`: its file's report."""

    key: str
    text: str
    entry: FileReport
    split: str | None = None
    """The split to which its source belongs; None: `boost.data.split` decides."""


def read_file(
    path: Path, key: str, text_field: str | None, entry: FileReport, report: PrepareReport
) -> Iterator[Document]:
    """Reads the documents in one file, whose suffix selects the reader. Counts bytes in `report.consumed`. Raises `Unreadable`."""
    name = path.name.lower()
    if name.endswith(REFUSED_SUFFIXES):
        tokens = "read token ids with --from-tokens, or " if name.endswith((".bin", ".idx")) else ""
        raise Unreadable(
            "refused: pickles and binary arrays are never loaded", fix=f"{tokens}export the text as .txt or .jsonl"
        )
    if name.endswith(JSON_SUFFIXES):
        yield from _read_json(path, key, text_field, entry, report)
    elif name.endswith(CSV_SUFFIXES):
        yield from _read_csv(path, key, text_field, entry, report)
    elif name.endswith(PARQUET_SUFFIXES):
        yield from _read_parquet(path, key, text_field, entry, report)
    elif name.endswith(ARROW_SUFFIXES):
        yield from _read_arrow(path, key, text_field, entry, report)
    else:
        with open_utf8(path, entry, report) as file:
            yield from _accept_pieces(_decoded(file), key, "", entry)


# ---- Text in every format: what is skipped, how line breaks are normalized, where long text is split


def accept(text: Any, key: str, where: str, entry: FileReport) -> Document | None:
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


def _accept_pieces(pieces: Iterable[Any], key: str, where: str, entry: FileReport) -> Iterator[Document]:
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


def find_text_column(wanted: str | None, columns: dict[str, bool], entry: FileReport) -> str:
    """The column with the text: `wanted`; else `text` or `content`; else the only one that holds strings.

    `columns`: whether each column holds strings, by name. Raises `Unreadable`, naming the columns, if none or several match.
    """
    strings = [name for name, is_string in columns.items() if is_string]
    names = ", ".join(list(columns)[:20]) or "no columns"
    if wanted is not None:
        if wanted not in columns:
            raise Unreadable(f"no column {wanted!r} among {names}", fix="choose one with --text-field")
        if wanted not in strings:
            raise Unreadable(f"column {wanted!r} does not hold strings", fix="choose another with --text-field")
        return wanted
    usual = [name for name in ("text", "content") if name in strings]
    if not usual and len(strings) != 1:
        raise Unreadable(f"no text column found among {names}", fix="choose one with --text-field")
    chosen = (usual or strings)[0]
    if chosen != "text":
        entry.note(f"read from column {chosen!r}, because the file has no 'text' column of strings")
    return chosen


def note_unread(entry: FileReport, names: Iterable[str]) -> None:
    """Notes the columns or fields whose text is not read."""
    if names := sorted(names):
        more = f" and {len(names) - 20} more" if len(names) > 20 else ""
        entry.note(f"with unread columns: {', '.join(names[:20])}{more}")


@contextmanager
def counting(documents: Callable[[], int]) -> Iterator[None]:
    """Context manager for choosing a file's text column. If there is no such column, all of the file's `documents` count as
    skipped. A file that is also damaged counts as one document."""
    try:
        yield
    except Unreadable as problem:
        with suppress(Exception):
            problem.documents = max(documents(), 1)
        raise


# ---- Bytes: decompressed by suffix, transcoded from UTF-16 and UTF-32


@contextmanager
def open_utf8(path: Path, entry: FileReport, report: PrepareReport) -> Iterator[io.BufferedReader]:
    """Opens a file for reading; keeps a UTF-8 byte order mark. If the file is transcoded, `entry` records this.

    Raises `Unreadable` for a damaged compressed file, here or in the body of the `with` statement.
    """
    compression = _COMPRESSION.get(path.suffix.lower(), "")
    try:
        with path.open("rb", buffering=0) as raw:
            counted: Any = _Counted(raw, report)
            match compression:
                case "gzip":
                    opened: Any = gzip.GzipFile(fileobj=counted)
                case "bzip2":
                    opened = bz2.BZ2File(counted)
                case "xz":
                    opened = _XzStreams(counted)
                case "zstd":
                    opened = require("pyarrow", "zstd files").CompressedInputStream(counted, "zstd")
                case _:
                    opened = counted
            file = io.BufferedReader(opened, CHUNK)
            if encoding := _foreign_codec(file.peek(200)[:200]):
                entry.note(f"encoded in {encoding.upper()[:6]}, converted to UTF-8")
                file = io.BufferedReader(_Transcoder(file, encoding), CHUNK)
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


class _XzStreams(io.RawIOBase):
    """The content of xz streams one after another, with padding between and after them, which `lzma.LZMAFile` takes for damage or
    for the end."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._decompressor = file, lzma.LZMADecompressor()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = b""
        while not data:
            rest = b""
            if self._decompressor.eof:
                rest = self._decompressor.unused_data.lstrip(b"\0")
                while not rest and (more := self._file.read(CHUNK)):
                    rest = more.lstrip(b"\0")
                if not rest:
                    return 0
                self._decompressor = lzma.LZMADecompressor()
            elif self._decompressor.needs_input and not (rest := self._file.read(CHUNK)):
                raise EOFError
            data = self._decompressor.decompress(rest, len(buffer))
        buffer[: len(data)] = data
        return len(data)


class _Counted(io.RawIOBase):
    """A file whose reads advance the progress bar."""

    def __init__(self, file: Any, report: PrepareReport) -> None:
        self._file, self._report = file, report

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = int(self._file.readinto(buffer))
        self._report.consumed += count
        return count


class _Transcoder(io.RawIOBase):
    """A file in another encoding, read as UTF-8 bytes without a byte order mark."""

    def __init__(self, file: IO[bytes], encoding: str) -> None:
        self._file, self._encoding = file, encoding
        self._decoder = codecs.getincrementaldecoder(encoding)()
        self._ready, self._read, self._ended = b"", 0, False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready and not self._ended:
            data = self._file.read(CHUNK)
            self._ended = not data
            try:
                self._ready = self._decoder.decode(data, final=self._ended).encode("utf-8")
            except UnicodeDecodeError as error:
                where = f"byte {self._read - (len(error.object) - len(data)) + error.start}"
                reason = f"damaged {self._encoding.upper()[:6]} text"
                raise Unreadable(reason, where, "save it as UTF-8") from error
            self._read += len(data)
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count


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


def _decoded(file: IO[bytes]) -> Iterator[str]:
    """The text of a file in pieces, without a byte order mark. Raises `Unreadable` with the offset of the first bad byte."""
    decoder, offset = codecs.getincrementaldecoder("utf-8")(), 0
    while True:
        data = file.read(CHUNK)
        nul = data.find(b"\0")
        if nul >= 0:
            raise Unreadable("binary (holds a NUL byte)", f"byte {offset + nul}")
        try:
            text = decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            # The decoder's input includes the incomplete character that ended the previous chunk.
            position = offset - (len(error.object) - len(data)) + error.start
            where = f"byte {position} (0x{error.object[error.start]:02x})"
            raise Unreadable(NOT_UTF8, where, "convert it, e.g. with 'iconv -f latin1 -t utf-8'") from None
        yield text if offset else text.removeprefix("\ufeff")
        if not data:
            return
        offset += len(data)


# ---- JSON: lines, so that one bad line does not end the file; or one array


def json_records(path: Path, entry: FileReport, report: PrepareReport) -> Iterator[tuple[int, str, Any]]:
    """Yields (number from 1, description of the position, value) for each record in a JSON file. Bad lines are skipped and
    reported. Raises `Unreadable`."""
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
                    value = json.loads(line.removeprefix(codecs.BOM_UTF8).strip())
                except UnicodeDecodeError as error:
                    entry.skip(NOT_UTF8, f"{where}, byte {error.start}")
                except (ValueError, RecursionError) as error:
                    # The decoder's own message says "line 1", which would be misleading here.
                    position = isinstance(error, json.JSONDecodeError) and f"{error.msg}, column {error.colno}"
                    entry.skip("not valid JSON", f"{where}: {position or error}")
                else:
                    yield number, where, value


def _whole_json(file: IO[bytes]) -> list[Any]:
    """Returns the elements of a JSON array, or a list with one value. Raises `Unreadable`."""
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
    except RecursionError:
        raise Unreadable("not JSON", "nested too deeply", "correct it") from None
    return value if isinstance(value, list) else [value]


def _list_in(record: dict[str, Any], text_field: str | None) -> str | None:
    """The field with the records, if an object is not a record itself but wraps them, as in {"version": ..., "data": [...]}.
    Raises `Unreadable` if several fields hold lists of records."""
    if any(isinstance(record.get(name), str) for name in ([text_field] if text_field else ["text", "content"])):
        return None
    lists = [name for name, value in record.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
    if len(lists) > 1:
        fix = f"write one of them as a list of its own, e.g. with: jq .{lists[0]}"
        raise Unreadable(f"one object with several lists of records: {', '.join(lists[:20])}", fix=fix)
    return lists[0] if lists else None


def _read_json(
    path: Path, key: str, text_field: str | None, entry: FileReport, report: PrepareReport
) -> Iterator[Document]:
    def records(entry: FileReport, report: PrepareReport) -> Iterator[tuple[int, str, Any]]:
        """The records in the file; those in the list of an object that wraps them."""
        found = json_records(path, entry, report)
        first = list(islice(found, 2)) if ".json" in (path.suffix.lower(), *path.suffixes[-2:-1]) else []
        wrapped = _list_in(first[0][2], text_field) if len(first) == 1 and isinstance(first[0][2], dict) else None
        if wrapped is None:
            yield from chain(first, found)
            return
        entry.note(f"read from the list in field {wrapped!r} of one JSON object")
        for number, value in enumerate(first[0][2][wrapped], start=1):
            yield number, f"record {number}", value

    field = text_field  # if given, records without it are skipped one by one
    if field is None:
        fields: dict[str, bool] = {}
        with suppress(Unreadable):  # a damaged file is read up to the damage
            for _, _, record in islice(records(FileReport(""), PrepareReport()), 100):
                for name, value in record.items() if isinstance(record, dict) else ():
                    fields[name] = fields.get(name, False) or isinstance(value, str)
        with counting(lambda: sum(1 for _ in records(FileReport(""), PrepareReport()))):
            field = find_text_column(None, fields, entry) if fields else "text"
    unread, is_strings = set[str](), False
    for number, where, record in records(entry, report):
        if isinstance(record, dict) and field in record:
            if len(record) > 1:
                unread.update(record)
            yield from _accept_pieces([record[field]], f"{key}:{number}", where, entry)
        elif isinstance(record, str) and (is_strings := is_strings or where == "record 1") and field == "text":
            yield from _accept_pieces([record], f"{key}:{number}", where, entry)
        else:
            what = ", ".join(list(record)[:8]) if isinstance(record, dict) else type(record).__name__
            entry.skip(f"without the field {field!r}", f"{where} has {what}")
    note_unread(entry, unread - {field})


# ---- Tables: a document per row, read by pandas (CSV) and pyarrow


@dataclass(frozen=True)
class _Dialect:
    """How a CSV file is written. `quotes`: whether a quote in a quoted field is `doubled` or `escaped` with a backslash, or all
    quotes are `literal` characters."""

    sep: str
    quotes: str = "doubled"

    def options(self) -> dict[str, Any]:
        """Arguments that `csv.reader` and `pandas.read_csv` have in common."""
        quoting = csv.QUOTE_NONE if self.quotes == "literal" else csv.QUOTE_MINIMAL
        is_escaped = self.quotes == "escaped"
        return {"quoting": quoting, "escapechar": "\\" if is_escaped else None, "doublequote": not is_escaped}

    def wrong_rows(self, lines: Iterable[str], stop: int) -> int:
        """How many rows (at most `stop`) contradict the dialect: rows with more or fewer fields than the header, with text
        after a closing quote, or, in TSV, with line breaks although each of their lines has the fields of a row."""
        read: list[str] = []
        recorded = (read.append(line) or line for line in lines)  # type: ignore[func-returns-value]
        rows = csv.reader(recorded, delimiter=self.sep, strict=True, **self.options())
        columns = wrong = 0
        while wrong < stop:
            read.clear()
            try:
                row = next(rows, None)
            except csv.Error:
                wrong += 1
                continue
            if row is None:
                break
            columns = columns or len(row)
            merges = len(read) > 1 and self.sep == "\t" and all(line.count("\t") == columns - 1 > 0 for line in read)
            wrong += bool(row) and (len(row) != columns or merges)
        return wrong


def _usual_delimiter(path: Path) -> str:
    return "\t" if ".tsv" in path.name.lower() else ","


@lru_cache(maxsize=1024)
def _dialect_of(path: Path, size: int, mtime_ns: int) -> tuple[_Dialect, bool]:
    """The dialect that the fewest rows contradict, and whether the file contains quotes.

    Reads the whole file, because quotes are text in all rows or in none. `size` and `mtime_ns` identify the file in the cache: each
    pass over the input asks again.
    """

    def lines() -> Iterator[str]:
        with open_utf8(path, FileReport(""), PrepareReport()) as file:
            text = io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="")
            while line := text.readline(MAX_RECORD_BYTES):
                yield line

    header, has_quotes, has_escapes = next(lines(), ""), False, False
    for line in lines():
        has_quotes, has_escapes = has_quotes or '"' in line, has_escapes or '\\"' in line
        if has_escapes:
            break
    usual = _usual_delimiter(path)
    delimiters = [sep for sep in dict.fromkeys((usual, ",", ";", "\t", "|")) if sep in header] or [usual]
    kinds = ("doubled", *(["escaped"] * has_escapes), *(["literal"] * has_quotes))
    best, fewest = _Dialect(usual), sys.maxsize
    field_limit = csv.field_size_limit(MAX_RECORD_BYTES)
    try:
        for dialect in (_Dialect(sep, quotes) for sep in delimiters for quotes in kinds):
            wrong = dialect.wrong_rows(lines(), fewest)
            best, fewest = (dialect, wrong) if wrong < fewest else (best, fewest)
            if not wrong:
                break
    finally:
        csv.field_size_limit(field_limit)
    return best, has_quotes


class _Bounded(io.RawIOBase):
    """A file that ends with an error after `left` bytes: a quote that is never closed would bring all of it into memory."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.left = file, MAX_JSON_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        self.left -= len(data)
        if self.left < 0:
            why = f"{CSV_ROWS} rows longer than {format_bytes(MAX_JSON_BYTES)}, or a quote that is never closed"
            raise Unreadable("not a CSV file", why, "correct it")
        buffer[: len(data)] = data
        return len(data)


def _read_csv(
    path: Path, key: str, text_field: str | None, entry: FileReport, report: PrepareReport
) -> Iterator[Document]:
    """Rows in a file with a header, as `pandas.read_csv` reads them for `datasets`, but with numbers as they are written."""
    pandas = require("pandas", "CSV files")
    about = path.stat()
    dialect, has_quotes = _dialect_of(path, about.st_size, about.st_mtime_ns)
    if dialect.sep != _usual_delimiter(path):
        entry.note(f"with the delimiter {dialect.sep!r}")
    if has_quotes and (dialect.quotes != "doubled" or dialect.sep == "\t"):
        meaning = {"doubled": "enclose fields", "escaped": "enclose fields, escaped with \\", "literal": "are text"}
        entry.note(f"in which quotes {meaning[dialect.quotes]}")
    options = {"sep": dialect.sep, "index_col": False, **dialect.options()}

    def rows(column: str | None, entry: FileReport, report: PrepareReport) -> Iterator[Any]:
        with open_utf8(path, entry, report) as file:
            bounded = _Bounded(file)
            # Objects: text as it is written, or NaN. Bytes that are not UTF-8 become surrogates, so that they end one row only.
            types = {"dtype": object, "encoding_errors": "surrogateescape", "on_bad_lines": "warn"}
            reader = pandas.read_csv(bounded, iterator=True, **types, **options)
            while True:
                bounded.left = MAX_JSON_BYTES
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    warnings.filterwarnings("error", "Length of header")
                    try:
                        chunk = reader.get_chunk(CSV_ROWS)
                    except StopIteration:
                        return
                for line in (line for warning in caught for line in str(warning.message).splitlines() if line):
                    where = line.replace("Skipping line", "record").replace(":", " (the header is 1):", 1)
                    entry.skip("with a wrong number of columns", where)
                yield from chunk.index if column is None else chunk[column]

    row = 0
    try:
        with open_utf8(path, FileReport(""), PrepareReport()) as file, warnings.catch_warnings():
            warnings.filterwarnings("error", "Length of header")
            # How pandas infers the types decides which columns hold strings.
            sample = pandas.read_csv(
                _Bounded(file), nrows=100, encoding_errors="replace", on_bad_lines="skip", **options
            )
        columns = {str(name): not pandas.api.types.is_numeric_dtype(sample[name]) for name in sample}
        if text_field is not None and columns.get(text_field) is False:
            entry.note(f"with numbers in column {text_field!r}, read as text")
            columns[text_field] = True
        with counting(lambda: sum(1 for _ in rows(None, FileReport(""), PrepareReport()))):
            column = find_text_column(text_field, columns, entry)
        note_unread(entry, columns.keys() - {column})
        for row, value in enumerate(rows(column, entry, report), start=1):
            if isinstance(value, str) and _UNDECODED.search(value):
                entry.skip(NOT_UTF8, f"row {row}")
            else:
                yield from _rows([value if isinstance(value, str) else None], row, key, entry)
    except pandas.errors.EmptyDataError:
        entry.skip("empty")
    except (pandas.errors.ParserError, pandas.errors.ParserWarning) as error:
        reason = str(error).strip().splitlines()[0].removeprefix("Error tokenizing data. C error: ")
        if isinstance(error, pandas.errors.ParserWarning):
            reason = "a row has more fields than the header"
        raise Unreadable("not a CSV file", f"after row {row}: {reason}", "correct it") from error


def _read_parquet(
    path: Path, key: str, text_field: str | None, entry: FileReport, report: PrepareReport
) -> Iterator[Document]:
    """A damaged row group ends the file; the rows before it are kept."""
    with open_parquet(path) as file:
        with counting(lambda: file.metadata.num_rows):
            column = _string_column(file.schema_arrow, text_field, entry)
        size, groups = path.stat().st_size, file.metadata.num_row_groups

        def batches() -> Iterator[Any]:
            for group in range(groups):
                yield from file.iter_batches(64, row_groups=[group], columns=[column])  # a row can be a whole book
                report.consumed += size // groups

        yield from _batches(batches(), column, "damaged Parquet file", key, entry)


def _read_arrow(
    path: Path, key: str, text_field: str | None, entry: FileReport, report: PrepareReport
) -> Iterator[Document]:
    """Rows in an Arrow file or stream, as `datasets` saves them."""
    pyarrow = require("pyarrow", "Arrow files")
    with pyarrow.OSFile(str(path)) as file:  # not a memory map, because truncating a mapped file would kill the process
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        with damage("not an Arrow file"):
            opened = pyarrow.ipc.open_file(file) if is_file else pyarrow.ipc.open_stream(file)
        batches = map(opened.get_batch, range(opened.num_record_batches)) if is_file else iter(opened)
        with counting(lambda: sum(batch.num_rows for batch in batches)):
            column = _string_column(opened.schema, text_field, entry)
        yield from _batches(batches, column, "damaged Arrow file", key, entry)
    report.consumed += path.stat().st_size


def _batches(batches: Iterator[Any], column: str, reason: str, key: str, entry: FileReport) -> Iterator[Document]:
    """Documents in record batches. Raises `Unreadable` with this reason at the first damaged batch."""
    row = 0
    while True:
        with damage(reason, f"after row {row}"):
            batch = next(batches, None)
        if batch is None:
            return
        yield from _rows((value.as_py() for value in batch.column(column)), row, key, entry)
        row += batch.num_rows


def _string_column(schema: Any, text_field: str | None, entry: FileReport) -> str:
    from pyarrow import types

    columns: dict[str, bool] = {}
    for field in schema:
        if field.name in columns:
            raise Unreadable(f"two columns are named {field.name!r}", fix="rename one of them")
        kind = field.type.value_type if types.is_dictionary(field.type) else field.type
        columns[field.name] = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    column = find_text_column(text_field, columns, entry)
    note_unread(entry, columns.keys() - {column})
    return column


def _rows(values: Iterable[Any], start: int, key: str, entry: FileReport) -> Iterator[Document]:
    """Documents in a column. `start`: number of its first row."""
    for row, value in enumerate(values, start):
        yield from _accept_pieces([value], f"{key}:{row}", f"row {row}", entry)


@contextmanager
def open_parquet(path: Path) -> Iterator[Any]:
    """A `pyarrow.parquet.ParquetFile`. Raises `Unreadable`, or `DataError` with the install command if pyarrow is missing."""
    parquet = require("pyarrow.parquet", "Parquet files")
    with damage("not a Parquet file"):
        file = parquet.ParquetFile(path)
    with file:
        yield file


@contextmanager
def damage(reason: str, where: str = "") -> Iterator[None]:
    """Turns pyarrow errors into `Unreadable`."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # a file system error
        detail = f"{where}: {(str(error).splitlines() or [type(error).__name__])[0]}".removeprefix(": ")
        raise Unreadable(reason, detail, "copy the file again") from error


def require(module: str, what: str) -> Any:
    """Imports a module from an optional package. Raises `DataError` with the install command if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise DataError(f"reading {what} needs the package {package!r}: pip install {package}") from error
