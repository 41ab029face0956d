"""Token ids that other tools wrote: Megatron's indexed datasets, nanoGPT's and llm.c's .bin files, and columns of `datasets`.

- Megatron-LM (`IndexedDataset`): PREFIX.bin holds the ids. PREFIX.idx is little-endian: `MMIDIDX\\0\\0`, version 1 (uint64), a code
  for the type of the ids (uint8), the numbers of sequences and of document indices (2 uint64), the length of each sequence (int32)
  and its byte offset (int64), and the document indices (int64): document i is the sequences from index i up to index i + 1.
- nanoGPT: ids without a header, uint16. A folder has train.bin and, held out, val.bin.
- llm.c: the same after a header of 256 int32: a magic number, which determines the type of the ids, a version, the number of ids.
- `datasets`: a column of lists of integers, in Arrow or Parquet. With `attention_mask`, ids whose mask is 0 are padding.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from boost.data.blocks import FileArray
from boost.data.documents import Unreadable
from boost.data.report import FileReport
from boost.data.tables import ARROW_SUFFIXES, PARQUET_SUFFIXES, damage, open_arrow, open_parquet
from boost.errors import DataError

Chunk = tuple[npt.NDArray[Any], bool]
"""Consecutive ids [n] of one document, and whether the document ends with them."""
_BLOCK = 1 << 20
"""Ids to read at a time."""


class TokenFile(Protocol):
    """One file of token ids."""

    @property
    def key(self) -> str:
        """Its name, from which the keys of its documents are made."""
        ...

    @property
    def split(self) -> str | None:
        """The split that it is for; None if its documents are divided by their hash."""
        ...

    def paths(self) -> list[Path]:
        """The files that it consists of."""
        ...

    def chunks(self, eos: int, entry: FileReport) -> Iterator[Chunk]:
        """The ids in order, any integer type, not validated. `eos`: ends documents, in formats without boundaries."""
        ...


def open_token_files(path: Path, column: str | None, dtype: str, split: str | None = None) -> list[TokenFile]:
    """The token files at a path, checked as far as that is possible without reading the ids. Raises `DataError`.

    `column`: of datasets, None for `input_ids`. `dtype`: `uint16` or `uint32`, of a .bin without an index or header. `split`: the
    split that they are for; None: a folder of nanoGPT has both, and the documents of others are divided.
    """
    if path.is_dir():
        return _open_folder(path, column, dtype, split)
    name = path.name.lower()
    if name.endswith((*ARROW_SUFFIXES, *PARQUET_SUFFIXES)):
        return [ColumnTokens(_existing(path), path.name, split, column or "input_ids")]
    index = path.with_suffix(".idx") if name.endswith((".bin", ".idx")) else path.with_name(f"{path.name}.idx")
    if name.endswith(".idx") or index.is_file():
        return [MegatronTokens(_existing(index), split)]
    if not name.endswith(".bin"):
        _existing(path)
        raise DataError(
            f"--from-tokens {path}: expected .bin, .idx, .arrow or .parquet, or a folder of nanoGPT or save_to_disk"
        )
    return [RawTokens(_existing(path), path.name, split, np.dtype(dtype).newbyteorder("<"))]


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise DataError(f"--from-tokens {path}: no such file; check the spelling")
    return path


def _open_folder(folder: Path, column: str | None, dtype: str, split: str | None) -> list[TokenFile]:
    kind = np.dtype(dtype).newbyteorder("<")
    if (folder / "train.bin").is_file() and not (folder / "train.idx").exists():
        files: list[TokenFile] = [RawTokens(folder / "train.bin", "train.bin", split, kind)]
        if split is None and (folder / "val.bin").is_file():
            files = [
                RawTokens(folder / f"{name}.bin", f"{name}.bin", of, kind)
                for name, of in (("train", "train"), ("val", "heldout"))
            ]
        return files
    if (folder / "dataset_dict.json").is_file():
        folder = folder / "train"
    shards = sorted(
        file for file in folder.glob("*") if file.name.lower().endswith((*ARROW_SUFFIXES, *PARQUET_SUFFIXES))
    )
    if shards:
        return [ColumnTokens(file, file.name, split, column or "input_ids") for file in shards]
    raise DataError(
        f"--from-tokens {folder}: contains neither train.bin nor .arrow or .parquet files; name a .bin or .idx file in it"
    )


@dataclass(frozen=True)
class RawTokens:
    """A .bin file of ids, with or without the header of llm.c. Documents end at eos."""

    path: Path
    key: str
    split: str | None
    dtype: np.dtype[Any]

    def paths(self) -> list[Path]:
        return [self.path]

    def chunks(self, eos: int, entry: FileReport) -> Iterator[Chunk]:
        dtype, start = self._header()
        size = self.path.stat().st_size
        if size % dtype.itemsize:
            raise DataError(
                f"{self.path}: {size} bytes are not a whole number of {dtype.name} ids; check --token-dtype, or copy it again"
            )
        ids = FileArray(self.path, dtype)
        blocks = (ids[at : at + _BLOCK] for at in range(start, len(ids), _BLOCK))
        yield from split_at_eos(blocks, eos)

    def _header(self) -> tuple[np.dtype[Any], int]:
        """The type of the ids and the index of the first. Raises `DataError`."""
        with self.path.open("rb") as file:
            head = file.read(_LLM_C_HEADER_BYTES)
        if len(head) < _LLM_C_HEADER_BYTES:
            return self.dtype, 0
        magic, version, count = struct.unpack("<3i", head[:12])
        if (magic, version) not in _LLM_C:
            return self.dtype, 0
        dtype = np.dtype(_LLM_C[magic, version])
        found = (self.path.stat().st_size - len(head)) / dtype.itemsize
        if count != found:
            raise DataError(f"{self.path}: has {found:.10g} ids, but its header says {count}; copy it again")
        return dtype, len(head) // dtype.itemsize


_LLM_C_HEADER_BYTES = 1024
_LLM_C = {(20240520, 1): "<u2", (20240801, 7): "<u4"}


def split_at_eos(blocks: Iterator[npt.NDArray[Any]], eos: int) -> Iterator[Chunk]:
    """Divides a stream of ids after every eos; what follows the last one is a document, too."""
    is_open = False
    for block in blocks:
        start = 0
        for end in np.flatnonzero(block == eos) + 1:
            yield block[start:end], True
            start, is_open = int(end), False
        if start < len(block):
            yield block[start:], False
            is_open = True
    if is_open:
        yield np.empty(0, dtype=np.int64), True


_MEGATRON_MAGIC = b"MMIDIDX\0\0"
_MEGATRON_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")


class MegatronTokens:
    """PREFIX.bin and PREFIX.idx. Documents are those of the index. Raises `DataError` if the two do not match."""

    def __init__(self, index: Path, split: str | None = None) -> None:
        self.index, self.path, self.split = index, _existing(index.with_suffix(".bin")), split
        self.key = self.path.name
        with index.open("rb") as file:
            head = file.read(_MEGATRON_HEADER.size)
            if not head.startswith(_MEGATRON_MAGIC) or len(head) < _MEGATRON_HEADER.size:
                raise self._error("not an index of Megatron-LM (it begins with other bytes)")
            _, version, code, n_sequences, n_indices = _MEGATRON_HEADER.unpack(head)
            if version != 1:
                raise self._error(f"version {version} of Megatron-LM's index; only version 1 is known")
            if code not in _MEGATRON_TYPES:
                raise self._error(
                    f"code {code} for the type of the ids; expected an integer type: {[*_MEGATRON_TYPES]}"
                )
            self.dtype = np.dtype(_MEGATRON_TYPES[code])
            # A multimodal dataset has another byte per sequence at the end.
            body = 12 * n_sequences + 8 * n_indices
            found = index.stat().st_size - len(head)
            if found not in (body, body + n_sequences):
                raise self._error(
                    f"{found} bytes after the header, but {body} for {n_sequences} sequences; copy it again"
                )
            lengths = np.fromfile(file, "<i4", n_sequences).astype(np.int64)
            offsets = np.fromfile(file, "<i8", n_sequences)
            indices = np.fromfile(file, "<i8", n_indices)
        self._ends = self._check(lengths, offsets, indices)

    def _check(
        self, lengths: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64], indices: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """The number of ids up to the end of each document."""
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        if (lengths < 0).any() or (offsets != ends[:-1] * self.dtype.itemsize).any():
            raise self._error("sequences that do not follow one another in the .bin file")
        if len(indices) < 1 or indices[0] != 0 or indices[-1] != len(lengths) or (np.diff(indices) < 0).any():
            raise self._error(f"document indices that do not divide the {len(lengths)} sequences")
        size, expected = self.path.stat().st_size, int(ends[-1]) * self.dtype.itemsize
        if size != expected:
            raise DataError(f"{self.path}: has {size} bytes, but {self.index.name} says {expected}; copy it again")
        return ends[indices[1:]]

    def _error(self, what: str) -> DataError:
        return DataError(f"{self.index}: {what}")

    def paths(self) -> list[Path]:
        return [self.path, self.index]

    def chunks(self, eos: int, entry: FileReport) -> Iterator[Chunk]:
        ids, start = FileArray(self.path, self.dtype), 0
        for end in map(int, self._ends):
            for at in range(start, end, _BLOCK):
                yield ids[at : min(at + _BLOCK, end)], at + _BLOCK >= end
            if start == end:
                yield np.empty(0, dtype=self.dtype), True
            start = end


@dataclass(frozen=True)
class ColumnTokens:
    """A column of lists of ids in an Arrow or Parquet file. A row is a document.

    If all rows (but the last) have the same length, they were packed: they are pieces of one stream, and documents end at eos.
    """

    path: Path
    key: str
    split: str | None
    column: str

    def paths(self) -> list[Path]:
        return [self.path]

    def chunks(self, eos: int, entry: FileReport) -> Iterator[Chunk]:
        try:
            if length := self._packed_length():
                entry.note(f"rows of {length} ids each, read as one stream: documents end at the end-of-document token")
                yield from split_at_eos(self._rows(entry), eos)
            else:
                for row in self._rows(entry):
                    yield row, True
        except Unreadable as problem:
            raise problem.as_error(self.path) from problem

    def _packed_length(self) -> int:
        """The common length of all rows but the last; 0 if there is none."""
        first, previous, count = 0, 0, 0
        for row in self._rows(FileReport("")):
            first = first or len(row)
            if count and previous != first:
                return 0
            previous, count = len(row), count + 1
        return first if count > 2 and previous <= first else 0

    def _rows(self, entry: FileReport) -> Iterator[npt.NDArray[Any]]:
        """The ids of each row, without padding."""
        number = 0
        for columns in self._columns():
            rows = [_lists(column) for column in columns]
            for ids, *masks in zip(*rows, strict=True):
                if masks and len(masks[0]) != len(ids):
                    where = f"row {number}"
                    raise Unreadable("attention_mask and ids of different lengths", where, "correct it")
                if masks and not masks[0].all():
                    entry.note("rows with padding (attention_mask 0), which was left out", f"row {number}")
                    ids = ids[masks[0] != 0]
                number += 1
                yield ids

    def _columns(self) -> Iterator[list[Any]]:
        """Batches of rows: the ids and, if there is one, the attention mask."""
        if self.path.name.lower().endswith(PARQUET_SUFFIXES):
            with open_parquet(self.path) as file:
                names = self._names(file.schema_arrow)
                batches = file.iter_batches(1000, columns=names)
                while True:
                    with damage("damaged Parquet file"):
                        batch = next(batches, None)
                    if batch is None:
                        return
                    yield [batch.column(name) for name in names]
        with open_arrow(self.path) as (schema, batches):
            names = self._names(schema)
            for batch in batches:
                yield [batch.column(name) for name in names]

    def _names(self, schema: Any) -> list[str]:
        import pyarrow

        if self.column not in schema.names:
            columns = ", ".join(schema.names[:20])
            raise Unreadable(f"no column {self.column!r} among {columns}", fix="choose one with --text-field")
        kind, kinds = schema.field(self.column).type, pyarrow.types
        is_list = kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind)
        if not is_list or not kinds.is_integer(kind.value_type):
            fix = "choose another with --text-field"
            raise Unreadable(f"column {self.column!r} has type {kind}, not lists of integers", fix=fix)
        return [name for name in (self.column, "attention_mask") if name in schema.names]


def _lists(column: Any) -> Iterator[npt.NDArray[Any]]:
    """The rows of a pyarrow array of lists; a null is an empty row."""
    import pyarrow.compute as pc

    values = column.flatten().to_numpy(zero_copy_only=False)
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    ends = np.cumsum(lengths)
    return (values[end - length : end] for end, length in zip(ends, lengths, strict=True))
