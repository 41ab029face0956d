"""Tables to documents, one per row: CSV, Parquet and Arrow. pyarrow reads all three."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from boost.data.byte_streams import COMPRESSED_SUFFIXES, open_utf8
from boost.data.documents import (
    NOT_UTF8,
    Document,
    Unreadable,
    accept_parts,
    find_text_column,
    missing_package,
    require_pyarrow,
)
from boost.data.report import FileReport, PrepareReport
from boost.format import format_bytes

CSV_SUFFIXES = tuple(f"{name}{packed}" for name in (".csv", ".tsv") for packed in ("", *COMPRESSED_SUFFIXES))
PARQUET_SUFFIXES = (".parquet",)
ARROW_SUFFIXES = (".arrow", ".feather")

MAX_ROW_BYTES = 1 << 26
"""Of CSV, whose reader allocates a block of this size."""
_BATCH_BYTES = 1 << 24
"""Of Parquet: about this much is decoded at a time, at least one row."""


def read_csv(
    path: Path, key: str, text_field: str | None, entry: FileReport, report: PrepareReport
) -> Iterator[Document]:
    """Rows of a file with a header; quoted text may hold line breaks. Raises `Unreadable`."""
    pyarrow = require_pyarrow("CSV files")
    from pyarrow import csv

    def record_bad_row(bad: Any) -> str:
        entry.skip("not a row of CSV", f"{bad.actual_columns} columns instead of {bad.expected_columns}")
        return "skip"

    row = 0
    try:
        column = _csv_column(path, text_field, entry)
        # As bytes, so that one row that is not UTF-8 does not end the file.
        convert = csv.ConvertOptions(include_columns=[column], column_types={column: pyarrow.binary()})
        with (
            open_utf8(path, entry) as file,
            csv.open_csv(file, _csv_blocks(), _csv_format(path, record_bad_row), convert) as batches,
        ):
            for batch in batches:
                yield from _rows(batch.column(0), row, key, entry, first_row=1)
                row += batch.num_rows
    except pyarrow.ArrowInvalid as error:
        reason = str(error).splitlines()[0]
        if "straddling" in reason:
            reason = f"a row longer than {format_bytes(MAX_ROW_BYTES)}, or a quote that is never closed"
        raise Unreadable("not a CSV file", f"after row {row}: {reason}", "correct it") from error
    report.consumed += path.stat().st_size


def _csv_column(path: Path, text_field: str | None, entry: FileReport) -> str:
    """The column with the text. Its type is inferred from the first block: text that is not UTF-8 is inferred as binary."""
    import pyarrow
    from pyarrow import csv

    with (
        open_utf8(path, FileReport("")) as file,
        csv.open_csv(file, _csv_blocks(), _csv_format(path, lambda _: "skip")) as batches,
    ):
        kinds = pyarrow.types
        columns = {
            field.name: kinds.is_string(field.type) or kinds.is_binary(field.type) or field.name == text_field
            for field in batches.schema
        }
    return find_text_column(text_field, columns, entry)


def _csv_blocks() -> Any:
    from pyarrow import csv

    return csv.ReadOptions(block_size=MAX_ROW_BYTES)


def _csv_format(path: Path, on_bad_row: Any) -> Any:
    from pyarrow import csv

    delimiter = "\t" if ".tsv" in path.name.lower() else ","
    return csv.ParseOptions(delimiter=delimiter, newlines_in_values=True, invalid_row_handler=on_bad_row)


def read_parquet(
    path: Path, key: str, text_field: str | None, entry: FileReport, report: PrepareReport
) -> Iterator[Document]:
    """Rows of a Parquet file; a damaged row group ends the file and keeps the rows before it. Raises `Unreadable`."""
    with open_parquet(path) as file:
        column = _string_column(file.schema_arrow, text_field, entry)
        row, size, groups = 0, path.stat().st_size, file.metadata.num_row_groups
        for group in range(groups):
            about = file.metadata.row_group(group)
            # A row can be a whole book.
            rows = max(min(64, _BATCH_BYTES * about.num_rows // max(about.total_byte_size, 1)), 1)
            with damage("damaged Parquet file", f"row group {group}"):
                for batch in file.iter_batches(rows, row_groups=[group], columns=[column]):
                    yield from _rows(batch.column(0), row, key, entry)
                    row += batch.num_rows
            report.consumed += size // groups


def read_arrow(
    path: Path, key: str, text_field: str | None, entry: FileReport, report: PrepareReport
) -> Iterator[Document]:
    """Rows of an Arrow file or stream, as `datasets` saves them. Raises `Unreadable`."""
    row = 0
    with open_arrow(path) as (schema, batches):
        column = _string_column(schema, text_field, entry)
        for batch in batches:
            yield from _rows(batch.column(column), row, key, entry)
            row += batch.num_rows
    report.consumed += path.stat().st_size


def _string_column(schema: Any, text_field: str | None, entry: FileReport) -> str:
    import pyarrow

    def is_string(kind: Any) -> bool:
        kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        kinds = pyarrow.types
        return bool(kinds.is_string(kind) or kinds.is_large_string(kind) or kinds.is_string_view(kind))

    return find_text_column(text_field, {field.name: is_string(field.type) for field in schema}, entry)


def _rows(values: Iterable[Any], start: int, key: str, entry: FileReport, first_row: int = 0) -> Iterator[Document]:
    """Documents of a column of strings or bytes. `start`: rows before it; `first_row`: the number of the file's first."""
    for row, value in enumerate(values, start + first_row):
        try:
            text = value.as_py()
            text = text.decode("utf-8") if isinstance(text, bytes) else text
        except UnicodeDecodeError as error:
            entry.skip(NOT_UTF8, f"row {row}, byte {error.start}")
        else:
            yield from accept_parts(text, f"{key}:{row}", f"row {row}", entry)


@contextmanager
def open_parquet(path: Path) -> Iterator[Any]:
    """A `pyarrow.parquet.ParquetFile`. Raises `Unreadable`."""
    pq = require_parquet()
    with damage("not a Parquet file"):
        file = pq.ParquetFile(path)
    with file:
        yield file


@contextmanager
def open_arrow(path: Path) -> Iterator[tuple[Any, Iterator[Any]]]:
    """The schema and the record batches of an Arrow file or stream. Raises `Unreadable`."""
    pyarrow = require_pyarrow("Arrow files")
    with pyarrow.OSFile(str(path)) as file:  # not a memory map: a file that becomes shorter would kill the process
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        with damage("not an Arrow file"):
            opened = pyarrow.ipc.open_file(file) if is_file else pyarrow.ipc.open_stream(file)
        yield opened.schema, _batches(opened, is_file)


def _batches(opened: Any, is_file: bool) -> Iterator[Any]:
    batches = map(opened.get_batch, range(opened.num_record_batches)) if is_file else iter(opened)
    number = 0
    while True:
        with damage("damaged Arrow file", f"batch {number}"):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch
        number += 1


@contextmanager
def damage(reason: str, where: str = "") -> Iterator[None]:
    """Turns errors of pyarrow into `Unreadable`."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the file system
        detail = f"{where}: {(str(error).splitlines() or [type(error).__name__])[0]}".removeprefix(": ")
        raise Unreadable(reason, detail, "copy it again") from error


def require_parquet() -> Any:
    """The module `pyarrow.parquet`. Raises `DataError` with the install command if it is missing."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise missing_package("Parquet files", "pyarrow") from error
    return pyarrow.parquet
