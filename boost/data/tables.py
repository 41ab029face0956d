"""Reads Parquet and Arrow files with pyarrow: one document per row, the text in one column.

A file that is damaged or not a table raises `Unreadable`; the batches of rows before the damage are kept.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

from boost.data.readers import (
    NOT_UTF8,
    Document,
    Unreadable,
    accept_pieces,
    find_text_column,
    note_unread,
    open_utf8,
    require,
)
from boost.data.report import FileReport, PrepareReport
from boost.errors import DataError

if TYPE_CHECKING:
    from pyarrow import DataType, Table

_KINDS = {".parquet": "Parquet", ".arrow": "Arrow", ".feather": "Arrow"}
TABLE_SUFFIXES = tuple(_KINDS)
BATCH_ROWS = 64
"""Number of rows to read at a time: a row can be a whole book."""


def read_table(
    path: Path, key: str, text_field: str | None, entry: FileReport, report: PrepareReport
) -> Iterator[Document]:
    """The documents in one file."""
    kind = _KINDS[path.suffix.lower()]
    schema = next(batch.schema for batch in _batches(kind, path))
    columns = {field.name: _holds_strings(field.type) for field in schema}
    everything = _batches(kind, path, schema.names[:1])
    column = find_text_column(text_field, columns, entry, lambda: sum(batch.num_rows for batch in everything))
    note_unread(entry, columns.keys() - {column})
    if schema.names.count(column) > 1:
        raise Unreadable(f"not a valid {kind} file", f"several columns are named {column!r}", "rename all but one")
    number = 0
    for batch in _batches(kind, path, [column], entry, report):
        for i in range(batch.num_rows):
            where = f"row {number + i}"
            try:
                value = batch[column][i].as_py()
            except UnicodeDecodeError:  # pyarrow does not validate text in Parquet
                entry.skip(NOT_UTF8, where)
                continue
            yield from accept_pieces([value], f"{key}:{number + i}", where, entry)
        number += batch.num_rows


def _holds_strings(kind: "DataType") -> bool:
    from pyarrow import types

    kind = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _parquet(file: IO[bytes], columns: list[str] | None) -> Iterator["Table"]:
    from pyarrow import Table, parquet

    opened = parquet.ParquetFile(file)
    yield Table.from_batches([], opened.schema_arrow)
    # Without threads, which would read ahead: the rows before damage that are kept would depend on their timing.
    for batch in opened.iter_batches(BATCH_ROWS, columns=columns, use_threads=False):
        yield Table.from_batches([batch])


def _arrow(file: IO[bytes], columns: list[str] | None) -> Iterator["Table"]:
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


def _batches(
    kind: str,
    path: Path,
    columns: list[str] | None = None,
    entry: FileReport | None = None,
    report: PrepareReport | None = None,
) -> Iterator["Table"]:
    """The rows as pyarrow tables, after an empty one with the schema. `columns`: those of Parquet to read."""
    report = report or PrepareReport()
    begin, row = report.consumed, 0
    require("pyarrow", f"{kind} files")
    try:
        with open_utf8(path, entry or FileReport(""), report) as file:
            for batch in (_parquet if kind == "Parquet" else _arrow)(file, columns):
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
