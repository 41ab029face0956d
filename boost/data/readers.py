"""Files to documents: plain text, JSON Lines, CSV and Parquet, plain or compressed with gzip or zstd. No input is ever executed.

A problem with a whole file raises `Unreadable`; the caller either ends the run (the user named that file) or records it in
the report (a folder was walked). A problem with one line or row is recorded in the report directly.
"""

import gzip
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from boost.config.text import foreign_encoding
from boost.data.report import FileReport, PrepareReport
from boost.errors import DataError
from boost.format import format_bytes

COMPRESSED_SUFFIXES = (".gz", ".zst")
JSONL_SUFFIXES = tuple(
    f"{name}{packed}" for name in (".jsonl", ".ndjson", ".json") for packed in ("", *COMPRESSED_SUFFIXES)
)
CSV_SUFFIXES = tuple(f"{name}{packed}" for name in (".csv", ".tsv") for packed in ("", *COMPRESSED_SUFFIXES))
PARQUET_SUFFIXES = (".parquet",)
# Formats whose loaders can run code. A text pickle (protocol 0) is valid ASCII, so the name alone must refuse it.
REFUSED_SUFFIXES = (".pkl", ".pickle", ".p", ".joblib", ".dill", ".npy", ".npz", ".pt", ".pth", ".bin", ".ckpt")

# These limits bound memory. Larger files are not single documents and must be split first.
MAX_DOCUMENT_BYTES = 4 << 30
MAX_LINE_BYTES = 1 << 30
MAX_ROW_BYTES = 1 << 26
"""Of CSV, whose reader allocates a block of this size."""

NOT_UTF8 = "not UTF-8 text"
BINARY = "binary (holds a NUL byte)"
EMPTY = "empty"
NO_STRING = "text field is not a string"
SURROGATE = "not valid Unicode (half of a surrogate pair)"


class Unreadable(Exception):
    """A file that cannot be read: why, where in the file, and how to fix it."""

    def __init__(self, reason: str, where: str = "", fix: str = "remove it from the inputs") -> None:
        super().__init__(reason)
        self.reason, self.where, self.fix = reason, where, fix


@dataclass(frozen=True, slots=True)
class Document:
    """One text that attends only to itself. `key` identifies it and determines its split; `entry` is its file's report."""

    key: str
    text: str
    entry: FileReport
    split: str | None = None
    """The split that its source is for; None: `boost.data.split` decides."""


def require_unchanged(path: Path, size: int, mtime_ns: int) -> None:
    """Raises `DataError` if a file has changed since it was listed: a store must not mix two versions of it."""
    try:
        found = path.stat()
    except OSError as error:
        raise DataError(f"{path}: disappeared during the preparation ({error.strerror}); {AGAIN}") from None
    if (found.st_size, found.st_mtime_ns) != (size, mtime_ns):
        raise DataError(f"{path}: changed during the preparation; {AGAIN}")


AGAIN = "nothing was written; run it again when nothing else writes to the input"


def read_file(path: Path, key: str, text_field: str, entry: FileReport, report: PrepareReport) -> Iterator[Document]:
    """The documents of one file, by its suffix. Raises `Unreadable`, or `DataError` for a wrong `text_field`."""
    name = path.name.lower()
    if name.endswith(REFUSED_SUFFIXES):
        raise Unreadable("refused: pickles and binary arrays are never loaded", fix="export the text as .txt or .jsonl")
    try:
        if name.endswith(JSONL_SUFFIXES):
            yield from _read_jsonl(path, key, text_field, entry, report)
        elif name.endswith(CSV_SUFFIXES):
            yield from _read_csv(path, key, text_field, entry, report)
        elif name.endswith(PARQUET_SUFFIXES):
            yield from _read_parquet(path, key, text_field, entry, report)
        else:
            yield from _read_text(path, key, entry, report)
    except EOFError as error:
        raise Unreadable("damaged gzip file", "truncated", "copy it again") from error
    except gzip.BadGzipFile as error:
        raise Unreadable("damaged gzip file", str(error), "copy it again") from error
    except OSError as error:
        if error.errno is None and name.endswith(".zst"):  # of pyarrow's decompression, not of the file system
            raise Unreadable("damaged zstd file", str(error).splitlines()[0], "copy it again") from error
        raise


def accept(text: Any, key: str, where: str, entry: FileReport) -> Document | None:
    """A document for the text; or None, and the reason is recorded in the report."""
    if not isinstance(text, str):
        entry.skip(NO_STRING, f"{where}: {type(text).__name__}".removeprefix(": "))
    elif not text or text.isspace():
        entry.skip(EMPTY, where)
    else:
        try:
            entry.take(len(text.encode("utf-8")))
            return Document(key, text, entry)
        except UnicodeEncodeError as error:
            entry.skip(SURROGATE, f"{where}: character {error.start}".removeprefix(": "))
    return None


def _open(path: Path) -> IO[bytes]:
    name = path.name.lower()
    if name.endswith(".gz"):
        return cast(IO[bytes], gzip.open(path, "rb"))
    if name.endswith(".zst"):
        pyarrow = require_pyarrow("zstd files")
        return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd"))
    return path.open("rb")


def decode(data: bytes) -> str:
    """Decodes the bytes of a file, without a byte order mark. Raises `Unreadable` with the offset of the first bad byte."""
    if encoding := foreign_encoding(data):
        raise Unreadable(f"{encoding} text, not UTF-8", fix=f"convert it, e.g. with 'iconv -f {encoding} -t utf-8'")
    nul = data.find(b"\0")
    if nul >= 0:
        raise Unreadable(BINARY, f"byte {nul}")
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        where = f"byte {error.start} (0x{data[error.start]:02x})"
        raise Unreadable(NOT_UTF8, where, "convert it, e.g. with 'iconv -f latin1 -t utf-8'") from None


def _read_text(path: Path, key: str, entry: FileReport, report: PrepareReport) -> Iterator[Document]:
    with _open(path) as file:
        data = file.read(MAX_DOCUMENT_BYTES + 1)
    if len(data) > MAX_DOCUMENT_BYTES:
        raise Unreadable(f"longer than {format_bytes(MAX_DOCUMENT_BYTES)}", fix="split it into several files")
    text = decode(data)
    del data
    document = accept(text, key, "", entry)
    report.consumed += path.stat().st_size
    if document:
        yield document


def _read_jsonl(path: Path, key: str, text_field: str, entry: FileReport, report: PrepareReport) -> Iterator[Document]:
    compressed = path.name.lower().endswith(COMPRESSED_SUFFIXES)
    with _open(path) as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            where = f"line {number}"
            if not compressed:
                report.consumed += len(line)
            if len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
                raise Unreadable(
                    f"a line longer than {format_bytes(MAX_LINE_BYTES)}", where, "split it into shorter lines"
                )
            if not line.strip():
                entry.skip("blank line", where)
                continue
            try:
                record = json.loads((line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line).strip())
            except UnicodeDecodeError as error:
                entry.skip(NOT_UTF8, f"{where}, byte {error.start}")
                continue
            except (ValueError, RecursionError) as error:
                # The decoder's own message says "line 1", which would be misleading here.
                detail = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
                entry.skip("not a line of JSON", f"{where}: {detail}")
                continue
            if not isinstance(record, dict) or text_field not in record:
                found = ", ".join(list(record)[:8]) if isinstance(record, dict) else type(record).__name__
                entry.skip(f"no field {text_field!r}", f"{where} has {found}")
                continue
            if document := accept(record[text_field], f"{key}:{number}", where, entry):
                yield document
    if compressed:
        report.consumed += path.stat().st_size


def _read_csv(path: Path, key: str, text_field: str, entry: FileReport, report: PrepareReport) -> Iterator[Document]:
    """Rows of a file with a header; quoted text may hold line breaks. Bytes, so that one bad row does not end the file."""
    pyarrow = require_pyarrow("CSV files")
    from pyarrow import csv

    def record_bad_row(bad: Any) -> str:
        entry.skip("not a row of CSV", f"{bad.actual_columns} columns instead of {bad.expected_columns}")
        return "skip"

    parse = csv.ParseOptions(
        delimiter="\t" if ".tsv" in path.name.lower() else ",",
        newlines_in_values=True,
        invalid_row_handler=record_bad_row,
    )
    convert = csv.ConvertOptions(include_columns=[text_field], column_types={text_field: pyarrow.binary()})
    row = 0
    try:
        with (
            _open(path) as file,
            csv.open_csv(file, csv.ReadOptions(block_size=MAX_ROW_BYTES), parse, convert) as batches,
        ):
            for batch in batches:
                for value in batch.column(0):
                    row += 1
                    try:
                        text = value.as_py().decode("utf-8")
                    except UnicodeDecodeError as error:
                        entry.skip(NOT_UTF8, f"row {row}, byte {error.start}")
                        continue
                    if document := accept(text, f"{key}:{row}", f"row {row}", entry):
                        yield document
    except (pyarrow.ArrowInvalid, KeyError) as error:
        reason = str(error).strip("'\"").splitlines()[0]
        if "include_columns" in reason:
            raise Unreadable(f"no column {text_field!r}", fix="choose one of its columns with --text-field") from error
        raise Unreadable("not a CSV file", f"after row {row}: {reason}", "correct it") from error
    report.consumed += path.stat().st_size


def _read_parquet(
    path: Path, key: str, text_field: str, entry: FileReport, report: PrepareReport
) -> Iterator[Document]:
    pq = require_parquet()
    import pyarrow

    try:
        file = pq.ParquetFile(path)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowException) as error:
        raise Unreadable("not a Parquet file", str(error).splitlines()[0], "copy it again") from error
    with file:
        schema = file.schema_arrow
        if text_field not in schema.names:
            columns = ", ".join(schema.names[:20])
            raise DataError(f"{path}: no column {text_field!r}; choose one with --text-field: {columns}")
        kind = schema.field(text_field).type
        if pyarrow.types.is_dictionary(kind):
            kind = kind.value_type
        if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
            raise DataError(f"{path}: column {text_field!r} has type {kind}, not string; choose another --text-field")
        row, groups, size = 0, file.metadata.num_row_groups, path.stat().st_size
        for group in range(groups):
            try:
                # Few rows at a time: a row can be a whole book.
                for batch in file.iter_batches(64, row_groups=[group], columns=[text_field]):
                    for value in batch.column(0):
                        try:
                            text = value.as_py()
                        except UnicodeDecodeError as error:
                            entry.skip(NOT_UTF8, f"row {row}, byte {error.start}")
                        else:
                            if document := accept(text, f"{key}:{row}", f"row {row}", entry):
                                yield document
                        row += 1
            except (pyarrow.ArrowException, OSError) as error:
                where = f"row group {group}: {str(error).splitlines()[0]}"
                raise Unreadable("damaged Parquet file", where, "copy it again") from error
            report.consumed += size // groups


def require_pyarrow(what: str) -> Any:
    """The module `pyarrow`. Raises `DataError` with the install command if it is missing."""
    try:
        import pyarrow
    except ImportError as error:
        raise missing_package(what, "pyarrow") from error
    return pyarrow


def require_parquet() -> Any:
    """The module `pyarrow.parquet`. Raises `DataError` with the install command if it is missing."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise missing_package("Parquet files", "pyarrow") from error
    return pyarrow.parquet


def missing_package(what: str, package: str) -> DataError:
    """The error for an optional dependency that is not installed."""
    return DataError(f"reading {what} needs the package {package!r}: pip install {package}")
