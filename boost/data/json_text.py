"""JSON to documents: JSON Lines, where a line may be longer than memory, and files that are one JSON array or pretty-printed.

JSON Lines are read line by line, so that one bad line does not end the file.
"""

import codecs
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import IO, Any

from boost.data.byte_streams import CHUNK, COMPRESSED_SUFFIXES, is_compressed, open_utf8
from boost.data.documents import NOT_UTF8, Document, Unreadable, accept_parts, accept_pieces, find_text_column
from boost.data.report import FileReport, PrepareReport
from boost.format import format_bytes

JSON_SUFFIXES = tuple(
    f"{name}{packed}" for name in (".jsonl", ".ndjson", ".json") for packed in ("", *COMPRESSED_SUFFIXES)
)

MAX_LINE_BYTES = 1 << 24
"""A longer line is parsed while it is read."""
MAX_VALUE_CHARS = 1 << 26
"""Of one element of a JSON array, which is parsed as a whole."""
_SAMPLE = 100
"""Records that are looked at to find the text field."""
_MARK = codecs.BOM_UTF8


class _BadRecord(Exception):
    """A record that is skipped: why, and details to add to its position."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail


def read_json(
    path: Path, key: str, text_field: str | None, entry: FileReport, report: PrepareReport
) -> Iterator[Document]:
    """The documents of a JSON file, one per record. Raises `Unreadable`."""
    field = text_field or _find_field(path, entry)  # records without a given field are skipped one by one
    with open_utf8(path, entry) as file:
        if _is_values(file, path):
            for number, value in enumerate(json_values(file), 1):
                yield from _of_record(value, field, f"{key}:{number}", f"record {number}", entry)
            report.consumed += path.stat().st_size
            return
        counted = not is_compressed(path)
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            where = f"line {number}"
            report.consumed += len(line) if counted else 0
            if len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
                rest = _LongLine(line, file, report if counted else PrepareReport())
                yield from _of_long_line(rest, field, f"{key}:{number}", where, entry)
            elif not line.strip():
                entry.skip("blank line", where)
            else:
                try:
                    value = _parse(line)
                except _BadRecord as bad:
                    entry.skip(bad.reason, f"{where}{bad.detail}")
                else:
                    yield from _of_record(value, field, f"{key}:{number}", where, entry)
    report.consumed += 0 if counted else path.stat().st_size


def _parse(line: bytes) -> Any:
    """Raises `_BadRecord`."""
    try:
        return json.loads(line.removeprefix(_MARK).strip())
    except UnicodeDecodeError as error:
        raise _BadRecord(NOT_UTF8, f", byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        # The decoder's own message says "line 1", which would be misleading here.
        detail = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
        raise _BadRecord("not a line of JSON", f": {detail}") from None


def _of_record(record: Any, field: str, key: str, where: str, entry: FileReport) -> Iterator[Document]:
    if isinstance(record, dict) and field in record:
        yield from accept_parts(record[field], key, where, entry)
    else:
        found = ", ".join(list(record)[:8]) if isinstance(record, dict) else type(record).__name__
        entry.skip(f"no field {field!r}", f"{where} has {found}")


def _of_long_line(line: "_LongLine", field: str, key: str, where: str, entry: FileReport) -> Iterator[Document]:
    try:
        yield from accept_pieces(line.text(field), key, where, entry)
    except _BadRecord as bad:
        entry.skip(bad.reason, f"{where}{bad.detail}")
    line.finish()


def _find_field(path: Path, entry: FileReport) -> str:
    """The field with the text, as the first records suggest. Raises `Unreadable` if that is unclear."""
    fields: dict[str, bool] = {}
    # A file that is damaged further on is read up to there.
    with suppress(Unreadable), open_utf8(path, FileReport("")) as file:
        for record in _sample(file, path):
            for name, is_text in record.items():
                fields[name] = fields.get(name, False) or is_text
    return find_text_column(None, fields, entry) if fields else "text"


def _sample(file: IO[bytes], path: Path) -> Iterator[dict[str, bool]]:
    """The fields of the first records, and whether each is a string."""
    read, taken = 0, 0
    if _is_values(file, path):
        for value, _ in zip(json_values(file), range(_SAMPLE), strict=False):
            if isinstance(value, dict):
                yield {name: isinstance(each, str) for name, each in value.items()}
        return
    while taken < _SAMPLE and read <= MAX_VALUE_CHARS and (line := file.readline(MAX_LINE_BYTES + 1)):
        long = _LongLine(line, file, PrepareReport()) if len(line) > MAX_LINE_BYTES else None
        try:
            record = long.fields() if long else _parse(line)
        except _BadRecord:
            record = None
        if isinstance(record, dict):
            taken += 1
            yield record if long else {name: isinstance(each, str) for name, each in record.items()}
        if long:
            long.finish()
        read += long.read if long else len(line)


def _is_values(file: Any, path: Path) -> bool:
    """Whether a .json file is not JSON Lines but one array, or pretty-printed. Does not move the position in the file."""
    if "json" not in path.name.lower().split(".")[-2:]:
        return False
    head = bytes(file.peek(CHUNK)).removeprefix(_MARK).lstrip()
    return head.startswith(b"[") or head.partition(b"\n")[0].strip() == b"{"


_SEPARATORS = re.compile(r"[\s,]*")


def json_values(file: IO[bytes]) -> Iterator[Any]:
    """The elements of a JSON array, or JSON values that follow one another. Raises `Unreadable` at the first that is malformed."""
    reader = codecs.getreader("utf-8-sig")(file)
    text, position, count = _read_chars(reader, CHUNK).lstrip(), 0, 0
    is_array = text.startswith("[")
    text = text[is_array:]
    while True:
        match = _SEPARATORS.match(text, position)
        position = match.end() if match else position
        try:
            if is_array and text.startswith("]", position):
                return
            value, position = json.JSONDecoder().raw_decode(text, position)
        except RecursionError:
            raise Unreadable("not JSON", f"record {count + 1}: nested too deeply", "correct it") from None
        except json.JSONDecodeError as error:
            # The value may only be incomplete. The amount doubles, so that the time to parse it again stays in proportion.
            more = _read_chars(reader, max(CHUNK, len(text) - position))
            if len(text) - position > MAX_VALUE_CHARS:
                where = f"after record {count}"
                raise Unreadable(f"a record longer than {format_bytes(MAX_VALUE_CHARS)}", where, _CONVERT) from None
            if not more:
                if not is_array and position == len(text):
                    return
                raise Unreadable("not JSON", f"record {count + 1}: {error.msg}", "correct it") from None
            text, position = text[position:] + more, 0
        else:
            count += 1
            yield value


_CONVERT = "convert it to JSON Lines, e.g. with: jq -c '.[]'"


def _read_chars(reader: codecs.StreamReader, count: int) -> str:
    try:
        return reader.read(count, count)
    except UnicodeDecodeError as error:
        raise Unreadable(NOT_UTF8, "", "save it as UTF-8") from error


# Up to the end of a string, or of what is there of it. Possessive: no backtracking into a megabyte of text.
_IN_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_SCALAR = re.compile(rb'[^\s,:\[\]{}"]+')
_SPACE = re.compile(rb"\s*")


class _LongLine:
    """A line of JSON that is parsed while it is read, holding about `CHUNK` bytes of it. Use one of `text` and `fields`."""

    def __init__(self, first: bytes, file: IO[bytes], report: PrepareReport) -> None:
        """`first`: the bytes of the line that have been read, and counted in `report`."""
        self.read = len(first)
        """Bytes of the line so far."""
        begun = (first.removeprefix(_MARK)[at : at + CHUNK] for at in range(0, len(first), CHUNK))
        self._chunks = chain(begun, self._rest(first, file, report))
        self._buffer, self._position, self._dropped = b"", 0, 0

    def _rest(self, last: bytes, file: IO[bytes], report: PrepareReport) -> Iterator[bytes]:
        while not last.endswith(b"\n") and (last := file.readline(CHUNK)):
            self.read += len(last)
            report.consumed += len(last)
            yield last

    def finish(self) -> None:
        """Reads to the end of the line."""
        for _ in self._chunks:
            pass

    def text(self, field: str) -> Iterator[str]:
        """The string in `field`, in pieces. Raises `_BadRecord` if there is none; what follows it in the line is not checked."""
        names = []
        for name in self._names():
            if name != field:
                names.append(name)
                self._skip_value()
            elif self._peek() != b'"':
                raise _BadRecord(f"no string in field {field!r}")
            else:
                yield from self._string()
                return
        raise _BadRecord(f"no field {field!r}", f" has {', '.join(names[:8])}")

    def fields(self) -> dict[str, bool]:
        """The fields, and whether each is a string. Raises `_BadRecord`."""
        found = {}
        for name in self._names():
            found[name] = self._peek() == b'"'
            self._skip_value()
        return found

    def _names(self) -> Iterator[str]:
        """The names of the object's fields; the caller reads the value of each before it takes the next."""
        mark = self._take(b"{")
        while mark != b"}":
            if self._peek() == b"}":
                return
            self._take(b'"', advance=False)
            name = ""
            for piece in self._string():
                name += piece
                if len(name) > CHUNK:
                    raise _BadRecord("not a line of JSON", ": a field name of more than 1 MB")
            self._take(b":")
            yield name
            mark = self._take(b",}")

    def _fill(self) -> bool:
        """Drops what has been parsed and reads on; False at the end of the line."""
        chunk = next(self._chunks, b"")
        self._dropped += self._position
        self._buffer, self._position = self._buffer[self._position :] + chunk, 0
        return bool(chunk)

    def _peek(self) -> bytes:
        """The next byte that is not white space; empty at the end."""
        while True:
            self._position = self._end(_SPACE)
            if self._position < len(self._buffer):
                return self._buffer[self._position : self._position + 1]
            if not self._fill():
                return b""

    def _where(self) -> str:
        return f"at byte {self._dropped + self._position}"

    def _end(self, pattern: re.Pattern[bytes]) -> int:
        match = pattern.match(self._buffer, self._position)
        return match.end() if match else self._position

    def _take(self, expected: bytes, advance: bool = True) -> bytes:
        found = self._peek()
        if not found or found not in expected:
            raise _BadRecord("not a line of JSON", f": no {' or '.join(expected.decode())} {self._where()}")
        self._position += advance
        return found

    def _string(self) -> Iterator[str]:
        """The string that begins at the current position, in pieces. Raises `_BadRecord`."""
        self._position += 1
        while True:
            end = self._end(_IN_STRING)
            complete = self._buffer[end : end + 1] == b'"'
            data = self._buffer[self._position : end]
            text, used = _decode_string(data, complete)
            yield text
            self._position += used
            if complete:
                self._position += 1
                return
            if not self._fill():
                raise _BadRecord("not a line of JSON", f": unterminated string of {format_bytes(self.read)}")

    def _skip_value(self) -> None:
        """Skips a value of any type; checks only that it ends."""
        depth = 0
        while True:
            mark = self._peek()
            if mark == b'"':
                for _ in self._string():
                    pass
            elif mark and mark in b"{[":
                depth += 1
                self._position += 1
            elif depth and mark and mark in b"}],:":
                depth -= mark in b"}]"
                self._position += 1
            elif (end := self._end(_SCALAR)) > self._position:
                self._position = end
                while self._position == len(self._buffer) and self._fill():
                    self._position = self._end(_SCALAR)
            else:
                raise _BadRecord("not a line of JSON", f": no value {self._where()}")
            if not depth:
                return


_LONGEST_ESCAPE = 12
"""Bytes of a pair of surrogates, as two `\\\\u` escapes."""


def _decode_string(data: bytes, complete: bool) -> tuple[str, int]:
    """The text of the inside of a JSON string, or of its beginning, and the bytes used: all, or all but an incomplete character.

    Raises `_BadRecord`.
    """
    for dropped in range(1 if complete else min(len(data), _LONGEST_ESCAPE) + 1):
        used = len(data) - dropped
        try:
            text = json.loads(f'"{data[:used].decode("utf-8")}"')
        except UnicodeDecodeError as error:
            problem = _BadRecord(NOT_UTF8, f": {error.reason}")
        except ValueError as error:
            problem = _BadRecord("not a line of JSON", f": {getattr(error, 'msg', error)}")
        else:
            if complete or not "\ud800" <= text[-1:] <= "\udbff" or dropped == _LONGEST_ESCAPE:
                return text, used
            problem = _BadRecord("not a line of JSON", ": half of a surrogate pair")
    raise problem
