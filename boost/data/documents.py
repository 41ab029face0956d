"""Documents, and the rules for text of every format: what is skipped, how line breaks are normalized, where long text is split."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from boost.data.report import FileReport
from boost.errors import DataError
from boost.format import format_count

# Longer text is split into several documents, so that memory does not depend on the length of a line, cell or file. All of it
# is kept. A document of 1M characters is longer than any context window, so training does not notice the boundaries.
MAX_DOCUMENT_CHARS = 16_000_000
PART_CHARS = 1_000_000

NOT_UTF8 = "not UTF-8 text"
BINARY = "binary (holds a NUL byte)"
EMPTY = "empty"
NO_STRING = "text field is not a string"
SURROGATE = "not valid Unicode (half of a surrogate pair)"
CRLF = "with CRLF line breaks, normalized to LF"


class Unreadable(Exception):
    """A file that cannot be read: why, where in the file, and how to fix it."""

    def __init__(self, reason: str, where: str = "", fix: str = "remove it from the inputs") -> None:
        super().__init__(reason)
        self.reason, self.where, self.fix = reason, where, fix

    def as_error(self, path: Path) -> DataError:
        """The error that ends the run if the user named the file."""
        where = f" at {self.where}" if self.where else ""
        return DataError(f"{path}: {self.reason}{where}; {self.fix}")


@dataclass(frozen=True, slots=True)
class Document:
    """One text that attends only to itself. `key` identifies it and determines its split; `entry` is its file's report."""

    key: str
    text: str
    entry: FileReport
    split: str | None = None
    """The split that its source is for; None: `boost.data.split` decides."""


def accept(text: Any, key: str, where: str, entry: FileReport) -> Document | None:
    """A document for the text; or None, and the reason is recorded in the report."""
    if not isinstance(text, str):
        entry.skip(NO_STRING, f"{where}: {type(text).__name__}".removeprefix(": "))
        return None
    if not text or text.isspace():
        entry.skip(EMPTY, where)
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


def accept_parts(text: Any, key: str, where: str, entry: FileReport) -> Iterator[Document]:
    """Like `accept`, but a long text becomes several documents."""
    if isinstance(text, str) and len(text) > MAX_DOCUMENT_CHARS:
        yield from accept_pieces([text], key, where, entry)
    elif document := accept(text, key, where, entry):
        yield document


def accept_pieces(pieces: Iterable[str], key: str, where: str, entry: FileReport) -> Iterator[Document]:
    """Like `accept_parts`, for a text that arrives in consecutive pieces: if it is long, it is never in memory as a whole."""
    iterator, head, length = iter(pieces), [], 0
    for piece in iterator:
        head.append(piece)
        length += len(piece)
        if length > MAX_DOCUMENT_CHARS:
            break
    if length <= MAX_DOCUMENT_CHARS:
        if document := accept("".join(head), key, where, entry):
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
            end = start + _last_boundary(buffer[start : start + PART_CHARS])
            yield buffer[start:end]
            start = end
        buffer = buffer[start:]
    if buffer:
        yield buffer


def _last_boundary(window: str) -> int:
    for mark in ("\n\n", "\n", " "):
        if (found := window.rfind(mark, len(window) // 2)) >= 0:
            return found + len(mark)
    # Not between the halves of a CRLF or, in malformed text, of a surrogate pair.
    return len(window) - (len(window) > 1 and (window[-1] == "\r" or "\ud800" <= window[-1] <= "\udbff"))


# Of datasets, in order of preference, unless --text-field names another.
USUAL_COLUMNS = ("text", "content")


def find_text_column(wanted: str | None, columns: dict[str, bool], entry: FileReport) -> str:
    """The column with the text: `wanted`; else a usual name; else the only one that holds strings.

    `columns`: by name, whether the column holds strings. Raises `Unreadable`, naming them, if none or several could be meant.
    """
    strings = [name for name, is_string in columns.items() if is_string]
    names = ", ".join(list(columns)[:20]) or "no columns"
    fix = "choose one with --text-field"
    if "input_ids" in columns and not strings:
        fix = "read token ids with --from-tokens"
    if wanted is not None:
        if wanted not in columns:
            raise Unreadable(f"no column {wanted!r} among {names}", fix=fix)
        if wanted not in strings:
            raise Unreadable(f"column {wanted!r} does not hold strings", fix="choose another with --text-field")
        return wanted
    chosen = next((name for name in USUAL_COLUMNS if name in strings), strings[0] if len(strings) == 1 else None)
    if chosen is None:
        raise Unreadable(f"no text column found among {names}", fix=fix)
    if chosen != USUAL_COLUMNS[0]:
        entry.note(f"without column {USUAL_COLUMNS[0]!r}, text read from {chosen!r}")
    return chosen


def missing_package(what: str, package: str) -> DataError:
    """The error for an optional dependency that is not installed."""
    return DataError(f"reading {what} needs the package {package!r}: pip install {package}")


def require_pyarrow(what: str) -> Any:
    """The module `pyarrow`. Raises `DataError` with the install command if it is missing."""
    try:
        import pyarrow
    except ImportError as error:
        raise missing_package(what, "pyarrow") from error
    return pyarrow
