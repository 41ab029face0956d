"""Reads CSV files with pandas, Parquet and Arrow files with pyarrow: a text in one column of each row, or a conversation per row.

A file that is damaged or not a table raises `Unreadable`; the batches of rows before the damage are kept.
"""

import csv
import io
import sys
import warnings
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from boost.data.conversations import document_of, records_of
from boost.data.readers import (
    MAX_RECORD_BYTES,
    NOT_UTF8,
    Document,
    Unreadable,
    accept_pieces,
    find_text_column,
    note_unread,
    open_utf8,
    require,
    with_compression,
)
from boost.data.report import FileReport, PrepareReport
from boost.errors import DataError
from boost.format import format_bytes

if TYPE_CHECKING:
    from pyarrow import DataType, Table

CSV_SUFFIXES = with_compression(".csv", ".tsv")
_KINDS = {".parquet": "Parquet", ".arrow": "Arrow", ".feather": "Arrow"}
TABLE_SUFFIXES = (*CSV_SUFFIXES, *_KINDS)
BATCH_ROWS = 64
"""Number of Parquet and Arrow rows to read at a time: a row can be a whole book."""
CSV_ROWS = 1000
"""Number of CSV rows to read at a time, or fewer if the longest could exceed `MAX_RECORD_BYTES` together."""


def read_table(
    path: Path, key: str, text_field: str | None, chat: bool, entry: FileReport, report: PrepareReport
) -> Iterator[Document]:
    """The documents in one file. `chat`: the rows are conversations."""
    kind = _KINDS.get(path.suffix.lower(), "CSV")
    is_csv = kind == "CSV"
    options = _csv_options(path, entry) if is_csv else {}
    # A sample decides which columns of CSV hold strings.
    sample = {"nrows": 100, "on_bad_lines": "skip", "encoding_errors": "replace"} if is_csv else {}
    schema = next((batch.schema for batch in _batches(kind, path, options | sample)), None)
    if schema is None:
        entry.skip("empty")
        return
    column, read = None, schema.names
    if not chat:
        columns = {field.name: _holds_strings(field.type) for field in schema}
        if is_csv and text_field is not None and columns.get(text_field) is False:
            entry.note(f"with numbers in column {text_field!r}, read as text")
            columns[text_field] = True
        everything = _batches(kind, path, options, read if is_csv else read[:1])
        column = find_text_column(text_field, columns, entry, lambda: sum(batch.num_rows for batch in everything))
        note_unread(entry, columns.keys() - {column})
        read = read if is_csv else [column]
    if twice := [name for name in schema.names if column in (None, name) and schema.names.count(name) > 1]:
        raise Unreadable(f"not a valid {kind} file", f"several columns are named {twice[0]!r}", "rename all but one")
    number = 1 if chat or is_csv else 0
    for batch in _batches(kind, path, options, read, entry, report):
        for i in range(batch.num_rows):
            where = f"{'record' if chat else 'row'} {number + i}"
            try:
                (value,) = records_of(batch.slice(i, 1)) if column is None else [batch[column][i].as_py()]
            except UnicodeDecodeError:  # pyarrow does not validate text in Parquet
                entry.skip(NOT_UTF8, where)
                continue
            if column is not None:
                yield from accept_pieces([value], f"{key}:{number + i}", where, entry)
            elif document := document_of(value, f"{key}:{number + i}", where, entry):
                yield document
        number += batch.num_rows


def _holds_strings(kind: "DataType") -> bool:
    from pyarrow import types

    kind = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _parquet(file: IO[bytes], columns: list[str] | None, _: dict[str, Any]) -> Iterator["Table"]:
    from pyarrow import Table, parquet

    opened = parquet.ParquetFile(file)
    yield Table.from_batches([], opened.schema_arrow)
    # Without threads, which would read ahead: the rows before damage that are kept would depend on their timing.
    for batch in opened.iter_batches(BATCH_ROWS, columns=columns, use_threads=False):
        yield Table.from_batches([batch])


def _arrow(file: IO[bytes], columns: list[str] | None, _: dict[str, Any]) -> Iterator["Table"]:
    from pyarrow import ArrowInvalid, Table, ipc

    try:
        batches = opened = ipc.open_stream(file)
    except (OSError, ArrowInvalid):
        opened = ipc.open_file(file)
        batches = map(opened.get_batch, range(opened.num_record_batches))
    yield Table.from_batches([], opened.schema)
    for batch in batches:
        batch.validate(full=True)
        yield from (Table.from_batches([batch.slice(at, BATCH_ROWS)]) for at in range(0, len(batch), BATCH_ROWS))


def _csv(file: IO[bytes], columns: list[str] | None, options: dict[str, Any]) -> Iterator["Table"]:
    import pandas
    from pyarrow import Table

    for frame in pandas.read_csv(file, dtype=object if columns else None, **options):
        if not columns:  # the sample: pandas has integers of any size, pyarrow has not, and only strings matter
            large = [name for name, column in frame.items() if any(isinstance(value, int) for value in column)]
            frame = frame.astype(dict.fromkeys(large, float))
        if len(frame):  # a header alone is no table
            yield Table.from_pandas(frame, preserve_index=False)


_READERS = {"Parquet": _parquet, "Arrow": _arrow, "CSV": _csv}


def _batches(
    kind: str,
    path: Path,
    options: dict[str, Any],
    columns: list[str] | None = None,
    entry: FileReport | None = None,
    report: PrepareReport | None = None,
) -> Iterator["Table"]:
    """The rows as pyarrow tables. The first table is empty if the schema is known before rows are read. `columns`: those of Parquet
    to read; CSV is then read as text."""
    entry, report = entry or FileReport(""), report or PrepareReport()
    begin, row = report.consumed, 0
    for package in ("pyarrow", "pandas") if kind == "CSV" else ("pyarrow",):
        require(package, f"{kind} files")
    try:
        with open_utf8(path, entry, report) as file:
            batches = _READERS[kind](file, columns, options)
            while True:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.filterwarnings("always", "Skipping line")
                    warnings.filterwarnings("error", "Length of header")
                    batch = next(batches, None)
                for line in "\n".join(str(warning.message) for warning in caught).splitlines():
                    if line.startswith("Skipping line"):
                        entry.skip("with a wrong number of columns", line)
                if batch is None:
                    break
                yield batch
                row += batch.num_rows
    except (DataError, Unreadable):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # a file system error
        reason, line = NOT_UTF8, " ".join(str(error).split())[:200] or type(error).__name__
        if not isinstance(error, UnicodeDecodeError):
            reason = f"damaged {kind} file" if row else f"not a valid {kind} file"
        raise Unreadable(reason, f"after row {row}: {line}" if row else line, "correct it or copy it again") from error
    report.consumed = begin + path.stat().st_size


# ---- How a CSV file is written


_QUOTES: dict[str, dict[str, Any]] = {
    "enclose fields": {"quoting": csv.QUOTE_MINIMAL, "doublequote": True, "escapechar": None},
    "enclose fields, escaped with \\": {"quoting": csv.QUOTE_MINIMAL, "doublequote": False, "escapechar": "\\"},
    "are text": {"quoting": csv.QUOTE_NONE, "doublequote": True, "escapechar": None},
}
"""What quotes do in a file: arguments that `csv.reader` and `pandas.read_csv` have in common."""


def _csv_options(path: Path, entry: FileReport) -> dict[str, Any]:
    about, usual = path.stat(), "\t" if ".tsv" in path.name.lower() else ","
    sep, quotes, longest = _dialect_of(path, usual, about.st_size, about.st_mtime_ns)
    if longest > MAX_RECORD_BYTES:
        why = f"a row longer than {format_bytes(MAX_RECORD_BYTES)}, or a quote that is never closed"
        raise Unreadable("not a valid CSV file", why, "correct it")
    if sep != usual:
        entry.note(f"with the delimiter {sep!r}")
    if quotes is not None and (quotes != "enclose fields" or sep == "\t"):
        entry.note(f"in which quotes {quotes}")
    rows = min(max(MAX_RECORD_BYTES // (longest or 1), 1), CSV_ROWS)
    dialect = {"sep": sep, **_QUOTES[quotes or "enclose fields"]}
    return {**dialect, "index_col": False, "on_bad_lines": "warn", "chunksize": rows}


@lru_cache(maxsize=1024)
def _dialect_of(path: Path, usual: str, size: int, mtime_ns: int) -> tuple[str, str | None, int]:
    """The delimiter and the meaning of quotes that the fewest rows contradict (None: there are no quotes), and the length of the
    longest row. `usual`: the delimiter to try first.

    Reads the whole file, because quotes are text in all rows or in none. `size` and `mtime_ns` identify the file in the cache: each
    pass over the input asks again.
    """

    def lines() -> Iterator[str]:
        with open_utf8(path, FileReport(""), PrepareReport()) as file:
            text = io.TextIOWrapper(file, "utf-8-sig", "replace", newline="")
            while line := text.readline(MAX_RECORD_BYTES + 1):
                yield line

    header, has_quotes, has_escapes = next(lines(), ""), False, False
    for line in lines():
        has_quotes, has_escapes = has_quotes or '"' in line, has_escapes or '\\"' in line
        if has_escapes:
            break
    plain, escaped, literal = _QUOTES
    kinds = (plain, *([escaped] * has_escapes), literal) if has_quotes else (None,)
    delimiters = [sep for sep in dict.fromkeys((usual, ",", ";", "\t", "|")) if sep in header] or [usual]
    best, fewest = (usual, kinds[0], 0), sys.maxsize
    field_limit = csv.field_size_limit(MAX_RECORD_BYTES)
    try:
        for sep, quotes in ((sep, quotes) for sep in delimiters for quotes in kinds):
            wrong, longest = _wrong_rows(lines(), sep, quotes or plain, fewest)
            if wrong < fewest:
                best, fewest = (sep, quotes, longest), wrong
    finally:
        csv.field_size_limit(field_limit)
    return best


def _wrong_rows(lines: Iterable[str], sep: str, quotes: str, stop: int) -> tuple[int, int]:
    """How many rows (at most `stop`) contradict the dialect, and the length of the longest. These are rows with more or fewer
    fields than the header, with text after a closing quote, or, in TSV, with line breaks although each of their lines has the
    fields of a row."""
    read: list[str] = []
    recorded = (read.append(line) or line for line in lines)  # type: ignore[func-returns-value]
    rows = csv.reader(recorded, delimiter=sep, strict=True, **_QUOTES[quotes])
    columns = wrong = longest = 0
    while wrong < stop:
        read.clear()
        try:
            row = next(rows, None)
        except csv.Error:
            row, wrong = [], wrong + 1
        if row is None:
            break
        columns, longest = columns or len(row), max(longest, sum(map(len, read)))
        merges = len(read) > 1 and sep == "\t" and all(line.count("\t") == columns - 1 > 0 for line in read)
        wrong += bool(row) and (len(row) != columns or merges)
    return wrong, longest
