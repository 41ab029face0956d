"""Files to documents, by suffix: text, JSON, CSV, Parquet and Arrow, plain or compressed. No input is ever executed.

A problem with a whole file raises `Unreadable`; the caller either ends the run (the user named that file) or records it in
the report (a folder was walked). A problem with one line or row is recorded in the report directly.
"""

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from boost.data.byte_streams import CHUNK, is_compressed, open_utf8
from boost.data.documents import BINARY, NOT_UTF8, Document, Unreadable, accept_pieces
from boost.data.json_text import JSON_SUFFIXES, read_json
from boost.data.report import FileReport, PrepareReport
from boost.data.tables import ARROW_SUFFIXES, CSV_SUFFIXES, PARQUET_SUFFIXES, read_arrow, read_csv, read_parquet
from boost.errors import DataError

# Formats whose loaders can run code. A text pickle (protocol 0) is valid ASCII, so the name alone must refuse it.
REFUSED_SUFFIXES = (".pkl", ".pickle", ".p", ".joblib", ".dill", ".npy", ".npz", ".pt", ".pth", ".ckpt")
TOKEN_SUFFIXES = (".bin", ".idx")
_READERS = {
    JSON_SUFFIXES: read_json,
    CSV_SUFFIXES: read_csv,
    PARQUET_SUFFIXES: read_parquet,
    ARROW_SUFFIXES: read_arrow,
}


def require_unchanged(path: Path, size: int, mtime_ns: int) -> None:
    """Raises `DataError` if a file has changed since it was listed: a store must not mix two versions of it."""
    try:
        found = path.stat()
    except OSError as error:
        raise DataError(f"{path}: disappeared during the preparation ({error.strerror}); {AGAIN}") from None
    if (found.st_size, found.st_mtime_ns) != (size, mtime_ns):
        raise DataError(f"{path}: changed during the preparation; {AGAIN}")


AGAIN = "nothing was written; run it again when nothing else writes to the input"


def read_file(
    path: Path, key: str, text_field: str | None, entry: FileReport, report: PrepareReport
) -> Iterator[Document]:
    """The documents of one file, by its suffix. Raises `Unreadable`."""
    name = path.name.lower()
    if name.endswith(REFUSED_SUFFIXES):
        raise Unreadable(REFUSED, fix="export the text as .txt or .jsonl")
    if name.endswith(TOKEN_SUFFIXES):
        raise Unreadable(REFUSED, fix="read token ids with --from-tokens, or export the text as .txt or .jsonl")
    for suffixes, read in _READERS.items():
        if name.endswith(suffixes):
            yield from read(path, key, text_field, entry, report)
            return
    yield from _read_text(path, key, entry, report)


REFUSED = "refused: pickles and binary arrays are never loaded"


def _read_text(path: Path, key: str, entry: FileReport, report: PrepareReport) -> Iterator[Document]:
    """A text file, which is one document unless it is long."""
    counted = None if is_compressed(path) else report
    with open_utf8(path, entry) as file:
        yield from accept_pieces(_decoded(file, counted), key, "", entry)
    report.consumed += 0 if counted else path.stat().st_size


def _decoded(file: IO[bytes], report: PrepareReport | None) -> Iterator[str]:
    """The text of a file in pieces, without a byte order mark. Raises `Unreadable` with the offset of the first bad byte."""
    decoder, offset = codecs.getincrementaldecoder("utf-8")(), 0
    while True:
        data = file.read(CHUNK)
        nul = data.find(b"\0")
        if nul >= 0:
            raise Unreadable(BINARY, f"byte {offset + nul}")
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
        if report:
            report.consumed += len(data)
