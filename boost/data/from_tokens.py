"""`boost prepare --from-tokens`: turns the token ids of Megatron-LM or nanoGPT into a token store.

- Megatron-LM (`IndexedDataset`): PREFIX.bin holds the ids. PREFIX.idx is little-endian: `MMIDIDX\\0\\0`, version 1 (uint64), a
  code for the id type (uint8), the numbers of sequences and of document indices (2 uint64), the length of each sequence (int32)
  and its byte offset (int64), and the document indices (int64): document i consists of sequences indices[i] to indices[i + 1] - 1.
- nanoGPT: uint16 ids without a header. A folder has train.bin and, for held-out data, val.bin.
- llm.c: a header of 256 int32 (a magic number, a version, the number of ids), then uint16 or uint32 ids; each document begins with
  eos.

The ids are copied, not linked, because a store has document offsets and ends each document with eos. The store's digests would
also no longer match if another tool rewrote linked files.
"""

import contextlib
import json
import struct
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from boost.data.blocks import FileArray
from boost.data.options import PrepareResult, Progress, TokenOptions
from boost.data.report import FileReport, PrepareReport
from boost.data.sources import require_unchanged
from boost.data.split import choose_split
from boost.data.store import TokenStore, token_dtype
from boost.data.tokenizer import find_eos, load_tokenizer, parse_training, tokenizer_identity, vocabulary_size
from boost.data.writer import TokenWriter, fingerprint_of, new_store, store_meta
from boost.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


_SAMPLE = 4096
"""Number of ids at the start of a file that are used to check its dtype."""
_BLOCK = 1 << 20
"""Number of ids to read at a time."""
_DECODED_IDS = 1 << 16
"""Number of ids to decode at a time when a document's bytes are counted by decoding."""
_MEGATRON_MAGIC = b"MMIDIDX\0\0"
_MEGATRON_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_LLMC_HEADER_BYTES = 1024
_LLMC_TYPES = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
_FOREIGN = {b"LITPKDS": "LitGPT", b"\x93NUMPY": "NumPy"}
"""Formats of arrays that other tools may store in .bin files, by their first bytes."""
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")


@dataclass(frozen=True)
class TokenFile:
    """A .bin file with ids. `ends` [n_documents]: the number of ids up to the end of each document; None: documents end at eos."""

    path: Path
    dtype: np.dtype[np.integer]
    split: str | None = None
    """The split of all documents in the file; None: the hash of each document decides."""
    index: Path | None = None
    ends: npt.NDArray[np.int64] | None = None
    header: int = 0
    """Number of ids that the header before the ids would be."""

    def paths(self) -> list[Path]:
        """The files that it consists of."""
        return [self.path] if self.index is None else [self.path, self.index]

    def pieces(self, eos: int) -> Iterator[tuple[npt.NDArray[np.integer], bool]]:
        """Yields consecutive ids of one document, not validated, and whether the document ends with them."""
        ids, start = FileArray(self.path, self.dtype), self.header
        for end in map(int, _ends_at_eos(ids, eos, start) if self.ends is None else self.ends):
            for at in range(start, max(end, start + 1), _BLOCK):  # one empty piece for an empty document
                yield ids[at : min(at + _BLOCK, end)], at + _BLOCK >= end
            start = end


def _ends_at_eos(ids: FileArray, eos: int, start: int) -> list[int]:
    """The number of ids up to and including every eos from `start` on. Ids after the last eos also form a document."""
    ends: list[int] = []
    for at in range(start, len(ids), _BLOCK):
        ends += (np.flatnonzero(ids[at : at + _BLOCK] == eos) + at + 1).tolist()
    return ends if len(ids) == (ends[-1] if ends else start) else [*ends, len(ids)]


def open_token_files(path: Path, dtype: str, split: str | None = None) -> list[TokenFile]:
    """The token files at a path, checked as far as possible without reading the ids. Raises `DataError`.

    `dtype`: `uint16` or `uint32`, for a .bin without an index. `split`: the split of all documents; None: train.bin and val.bin in
    a nanoGPT folder are the two splits, and all other documents are assigned by hash.
    """
    if path.is_dir():
        if not (path / "train.bin").is_file():
            raise DataError(f"--from-tokens {path}: the folder contains no train.bin; pass a .bin or .idx file in it")
        if split is None and (path / "val.bin").is_file():
            return [_open_raw(path / "train.bin", dtype, "train"), _open_raw(path / "val.bin", dtype, "heldout")]
        return [_open_raw(path / "train.bin", dtype, split)]
    is_tokens = path.suffix.lower() in (".bin", ".idx")
    index = path.with_suffix(".idx") if is_tokens else path.with_name(f"{path.name}.idx")
    if path.suffix.lower() == ".idx" or index.is_file():
        return [_open_megatron(_existing(index), split)]
    if not is_tokens:
        _existing(path)
        raise DataError(
            f"--from-tokens {path}: not token ids; pass a Megatron-LM .bin or .idx file, or a nanoGPT .bin file or folder"
        )
    return [_open_raw(_existing(path), dtype, split)]


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise DataError(f"--from-tokens {path}: no such file; check the spelling")
    return path


def _open_raw(path: Path, dtype: str, split: str | None) -> TokenFile:
    kind, size = np.dtype(dtype).newbyteorder("<"), path.stat().st_size
    header = np.fromfile(path, "<i4", _LLMC_HEADER_BYTES // 4)
    if len(header) == _LLMC_HEADER_BYTES // 4 and header[0] in [magic for magic, _ in _LLMC_TYPES]:
        if (known := (int(header[0]), int(header[1]))) not in _LLMC_TYPES:
            raise DataError(
                f"{path}: version {header[1]} of llm.c's token files is not supported; valid: {[*_LLMC_TYPES]}"
            )
        kind = np.dtype(_LLMC_TYPES[known])
        if size != _LLMC_HEADER_BYTES + int(header[2]) * kind.itemsize:
            raise DataError(f"{path}: {size} bytes do not hold the {header[2]} ids of its header; copy the file again")
        return TokenFile(path, kind, split, header=_LLMC_HEADER_BYTES // kind.itemsize)
    owner = next((name for magic, name in _FOREIGN.items() if header.tobytes().startswith(magic)), "")
    index = path.with_name("index.json")
    if path.name.startswith("chunk-") and index.is_file() and b'"chunks"' in index.read_bytes():
        owner = "LitData"
    if header.tobytes().startswith(b"PK") and zipfile.is_zipfile(path):
        owner = "torch.save or NumPy"
    if owner:
        raise DataError(
            f"{path}: a file of {owner}, whose header is not ids; write the ids alone, as NumPy's tofile does"
        )
    if size % kind.itemsize:
        raise DataError(
            f"{path}: {size} bytes are not a whole number of {dtype} ids; check --token-dtype, or copy the file again"
        )
    sample = np.fromfile(path, kind, _SAMPLE)
    if len(sample) >= 64 and not sample[1::2].any() and sample[::2].any():
        fix = "pass --token-dtype uint32" if dtype == "uint16" else "write them as uint32, e.g. with NumPy's astype"
        raise DataError(f"{path}: every second id is 0, as if the ids were wider than {dtype}; {fix}")
    return TokenFile(path, kind, split)


def _open_megatron(index: Path, split: str | None) -> TokenFile:
    """Opens PREFIX.bin and PREFIX.idx. Raises `DataError` if the two do not match."""
    path = _existing(index.with_suffix(".bin"))
    with index.open("rb") as file:
        head = file.read(_MEGATRON_HEADER.size)
        if not head.startswith(_MEGATRON_MAGIC) or len(head) < _MEGATRON_HEADER.size:
            raise DataError(f"{index}: not a Megatron-LM index (invalid header)")
        _, version, code, n_sequences, n_indices = _MEGATRON_HEADER.unpack(head)
        if version != 1:
            raise DataError(f"{index}: Megatron-LM index version {version} is not supported; valid version: 1")
        if code not in _MEGATRON_TYPES:
            known = [*_MEGATRON_TYPES]
            raise DataError(f"{index}: id type code {code} is not supported; valid codes (integer types): {known}")
        dtype = np.dtype(_MEGATRON_TYPES[code])
        expected, size = 12 * n_sequences + 8 * n_indices, index.stat().st_size - len(head)
        if size not in (expected, expected + n_sequences):  # a multimodal dataset has one more byte per sequence
            raise DataError(
                f"{index}: {size} bytes follow the header instead of {expected} for {n_sequences} sequences; copy the file again"
            )
        lengths = np.fromfile(file, "<i4", n_sequences).astype(np.int64)
        offsets = np.fromfile(file, "<i8", n_sequences)
        indices = np.fromfile(file, "<i8", n_indices)
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    if (lengths < 0).any() or (offsets != ends[:-1] * dtype.itemsize).any():
        raise DataError(f"{index}: the sequences are not contiguous in the .bin file")
    if len(indices) < 1 or indices[0] != 0 or indices[-1] != len(lengths) or (np.diff(indices) < 0).any():
        raise DataError(f"{index}: the document indices do not partition the {len(lengths)} sequences")
    size, expected = path.stat().st_size, int(ends[-1]) * dtype.itemsize
    if size != expected:
        raise DataError(f"{path} has {size} bytes, but {index.name} expects {expected}; copy the file again")
    return TokenFile(path, dtype, split, index, ends[indices[1:]])


_Part = tuple[str, str | None, npt.NDArray[np.integer], bool, FileReport]
"""Consecutive ids in a document, without the eos at its end: the document's key, its split (None until it is chosen), the ids,
whether the document ends with them, and the file's report."""


class TokenInput:
    """The files for `--from-tokens`. The constructor lists them and checks their headers. Raises `DataError`."""

    def __init__(self, options: TokenOptions) -> None:
        self.name = options.from_tokens
        self._dtype = options.token_dtype
        self.files = open_token_files(Path(self.name), self._dtype, "train" if options.heldout_from else None)
        for path in options.heldout_from:
            self.files += open_token_files(Path(path), self._dtype, "heldout")
        self._stats = {path: path.stat() for file in self.files for path in file.paths()}
        self.size = sum(about.st_size for about in self._stats.values())

    def fingerprint(self) -> list[object]:
        """Identifies the input without reading it (see `Source`)."""
        return [[[path.name, a.st_size, a.st_mtime_ns] for path, a in self._stats.items()], self._dtype]

    def parts(self, eos: int, vocab_size: int, report: PrepareReport, progress: Progress) -> Iterator[_Part]:
        """Makes one pass over the documents and records empty ones in the report. Raises `DataError` for ids outside the
        vocabulary."""
        section = report.source(self.name)
        consumed = documents = 0
        for file in self.files:
            entry, number, length, read = section.file(file.path.name), 0, 0, 0
            before = {path: self._stats[path] for path in file.paths()}
            for path, about in before.items():
                require_unchanged(path, about.st_size, about.st_mtime_ns)
            if file.ends is None and not file.header and vocab_size > np.iinfo(file.dtype).max + 1:
                raise DataError(
                    f"{file.path}: --token-dtype {self._dtype} cannot hold the ids of a vocabulary of {vocab_size} tokens; "
                    "pass --token-dtype uint32, or pass the tokenizer that produced the ids with --tokenizer"
                )
            for ids, end in file.pieces(eos):
                if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
                    at = int(np.argmax((ids < 0) | (ids >= vocab_size)))
                    raise DataError(
                        f"{file.path}: id {ids[at]} (at index {read + at} in the file) is outside the tokenizer's vocabulary of "
                        f"{vocab_size} tokens; pass the tokenizer that produced the ids with --tokenizer, or check --token-dtype"
                    )
                read, consumed = read + len(ids), consumed + ids.nbytes
                progress.update(min(consumed, self.size), documents)
                if end and len(ids) and ids[-1] == eos:
                    ids = ids[:-1]
                length += len(ids)
                if length:
                    yield f"{file.path.name}:{number}", file.split, ids, end, entry
                if not end:
                    continue
                if length:
                    documents += 1
                else:
                    entry.skip("empty", f"document {number}")
                number, length = number + 1, 0
            for path, about in before.items():
                require_unchanged(path, about.st_size, about.st_mtime_ns)


def prepare_tokens(options: TokenOptions, progress: Progress | None = None) -> PrepareResult:
    """Builds the token store `options.out` from the ids of another tool, as `boost.data.prepare.prepare` does from text. Raises the
    same errors, and `DataError` for ids outside the vocabulary."""
    started = time.monotonic()
    progress = progress or Progress()
    if parse_training(options.tokenizer):
        raise DataError(
            f"--from-tokens {options.from_tokens} needs the tokenizer that produced the ids; pass it with --tokenizer, such as "
            "gpt2 or its tokenizer.json"
        )
    tokens = TokenInput(options)
    fingerprint = fingerprint_of(
        tokens=tokens.fingerprint(),
        tokenizer=tokenizer_identity(options.tokenizer, options.eos),
        options=[options.eos, options.heldout],
    )
    with new_store(options.out, fingerprint, options.overwrite) as unfinished:
        if unfinished is not None:
            with contextlib.closing(progress):
                _build(options, tokens, fingerprint, unfinished.folder, progress)
    return PrepareResult(TokenStore.open(options.out), unfinished is None, time.monotonic() - started)


def _build(options: TokenOptions, tokens: TokenInput, fingerprint: str, folder: Path, progress: Progress) -> None:
    """Fills the folder of a new store. Raises `DataError` for ids outside the vocabulary, and if a split is empty."""
    report, scanned = PrepareReport(), PrepareReport()
    tokenizer = load_tokenizer(options.tokenizer, report.notes)
    eos = find_eos(tokenizer, options.eos, options.tokenizer)
    size = vocabulary_size(tokenizer)
    if metas := [path for file in tokens.files if (path := file.path.with_name("meta.pkl")).is_file()]:
        report.notes.append(f"{metas[0]} is not read; if it has the ids' vocabulary, --tokenizer must have the same")
    rule = None
    if tokens.files[0].split is None:
        progress.phase("scanning the ids", tokens.size)
        parts = tokens.parts(eos[1], size, scanned, progress)
        rule = choose_split((key for key, _, _, end, _ in parts if end), options.heldout)
        if rule is None:
            raise DataError(f"the input contains no token ids: {scanned.skipped_in_words()}; pass files that do")
        if rule.single:
            raise DataError(
                f"--from-tokens {tokens.name} contains only one document, so none can be held out; pass held-out ids with "
                "--heldout-from, or pass the end-of-document token with --eos"
            )
    count_bytes = byte_counter(tokenizer)
    progress.phase("copying the ids", tokens.size)
    with TokenWriter(folder, token_dtype(size), eos[1]) as writer:
        for key, split, ids, end, entry in tokens.parts(eos[1], size, report, progress):
            n_bytes = count_bytes(ids)
            writer.append(split or ("train" if rule is None else rule.split_of(key)), ids, n_bytes, end)
            entry.documents += end
            entry.bytes += n_bytes
            entry.tokens += len(ids) + end
        for name, sizes in writer.sizes.items():
            if not sizes["documents"]:
                raise DataError(
                    f"--from-tokens {tokens.name}: the {name} split contains no token ids: {report.skipped_in_words()}"
                )
        meta = store_meta(tokenizer, eos, fingerprint, options, report)
        writer.finish(tokenizer.to_str(), meta, report.details())


def byte_counter(tokenizer: "Tokenizer") -> Callable[[npt.NDArray[np.integer]], int]:
    """Returns a function that counts the UTF-8 bytes in the text of ids, without special tokens. A store records this count for
    computing bits per byte.

    Uses an exact table for byte-level tokenizers. For others, decodes the ids in pieces, which can be off by a byte or two each.
    """
    from tokenizers.pre_tokenizers import ByteLevel

    def decoded(ids: npt.NDArray[np.integer]) -> int:
        pieces = (ids[at : at + _DECODED_IDS].tolist() for at in range(0, len(ids), _DECODED_IDS))
        return sum(len(tokenizer.decode(piece, skip_special_tokens=True).encode("utf-8")) for piece in pieces)

    if (json.loads(tokenizer.to_str()).get("decoder") or {}).get("type") != "ByteLevel":
        return decoded
    alphabet = set(ByteLevel.alphabet())  # characters that stand for one byte each
    table = np.zeros(vocabulary_size(tokenizer), dtype=np.int64)
    for token, index in tokenizer.get_vocab(with_added_tokens=True).items():
        table[index] = len(token) if alphabet.issuperset(token) else len(token.encode("utf-8"))
    for index, added in tokenizer.get_added_tokens_decoder().items():
        if added.special:
            table[index] = 0
    return lambda ids: int(table[ids].sum())
