"""`boost prepare --from-tokens`: turns the token ids that another tool wrote into a token store.

The ids are copied, not linked: a store has offsets of documents and ends each of them with eos, and its digests would no longer
match files that another tool writes again.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from boost.data.readers import require_unchanged
from boost.data.report import FileReport, PrepareReport
from boost.data.split import SplitRule, rule_for_keys
from boost.data.store import FORMAT, token_dtype
from boost.data.token_files import TokenFile, open_token_files
from boost.data.tokenizer import find_eos, load_tokenizer, parse_training, vocabulary_size
from boost.data.writer import TokenWriter, store_meta
from boost.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from boost.data.prepare import PrepareOptions, Progress

# A document whose bytes are counted by decoding is decoded this many ids at a time.
_DECODED_IDS = 1 << 16


class TokenInput:
    """The files of `--from-tokens`. They are listed and their headers checked when it is created. Raises `DataError`."""

    def __init__(self, options: "PrepareOptions") -> None:
        assert options.from_tokens is not None
        if options.inputs or options.stdlib or options.hf is not None or options.heldout_split is not None:
            raise DataError(f"--from-tokens {options.from_tokens}: cannot be combined with text; prepare two stores")
        if parse_training(options.tokenizer) is not None:
            raise DataError(
                f"--from-tokens {options.from_tokens}: needs the tokenizer that made the ids; name it with --tokenizer, "
                f"such as gpt2 or its tokenizer.json"
            )
        if options.max_tokens is not None or options.max_heldout_tokens is not None:
            raise DataError(f"--from-tokens {options.from_tokens}: takes no --max-tokens; use --max-documents")
        self.name, self._dtype, self._column = options.from_tokens, options.token_dtype, options.text_field
        self.files = open_token_files(
            Path(options.from_tokens), self._column, self._dtype, "train" if options.heldout_from else None
        )
        for path in options.heldout_from:
            self.files += open_token_files(Path(path), self._column, self._dtype, "heldout")
        self._stats = {path: path.stat() for file in self.files for path in file.paths()}
        self.size = sum(found.st_size for found in self._stats.values())

    def fingerprint(self) -> list[Any]:
        """Identifies the input without reading it (see `Source`)."""
        files = [[path.name, found.st_size, found.st_mtime_ns] for path, found in self._stats.items()]
        return [files, self._dtype, self._column]

    def require_unchanged(self, file: TokenFile) -> None:
        """Raises `DataError` if a file has changed since it was listed."""
        for path in file.paths():
            require_unchanged(path, self._stats[path].st_size, self._stats[path].st_mtime_ns)


def build_from_tokens(
    options: "PrepareOptions", tokens: TokenInput, fingerprint: str, folder: Path, progress: "Progress"
) -> None:
    """Fills the folder of a new store. Raises `DataError` for ids outside the vocabulary, and if a split is empty."""
    tokenizer = load_tokenizer(options.tokenizer)
    spec = Path(options.tokenizer)
    eos = find_eos(tokenizer, options.eos, spec if spec.is_dir() else spec.parent if spec.is_file() else None)
    size, report = vocabulary_size(tokenizer), PrepareReport()
    reading = _Reading(tokens, size, eos[1], options.max_documents, progress)
    rule = _choose_rule(reading, options.heldout)
    count_bytes = ByteCounter(tokenizer)
    with TokenWriter(folder, token_dtype(size), eos[1]) as writer:
        for part in _placed(reading.parts("copying the ids", report), rule, reading.ids):
            n_bytes = count_bytes(part.ids)
            writer.append(part.split or "train", part.ids, n_bytes, part.end)
            part.entry.documents += part.end
            part.entry.bytes += n_bytes
            part.entry.tokens += len(part.ids) + part.end
        for name, sizes in writer.sizes.items():
            if not sizes["documents"]:
                raise DataError(
                    f"--from-tokens {tokens.name}: no ids for the {name} split; {report.skipped_in_words()}"
                )
        report.notes += _notes(rule, reading.documents == options.max_documents, reading.documents)
        meta = store_meta(FORMAT, tokenizer, eos, fingerprint, options, report)
        writer.finish(tokenizer.to_str(), meta, report.details())


def _notes(rule: SplitRule | None, limited: bool, documents: int) -> list[str]:
    notes = []
    if rule is not None and rule.single:
        notes.append("the ids are one document: its last part is held out (--eos names the token that ends documents)")
    if limited:
        notes.append(f"only the first {documents} documents were read (--max-documents)")
    return notes


@dataclass(frozen=True)
class _Part:
    """Consecutive ids of a document, without the eos at its end. `split`: None until it is chosen."""

    key: str
    split: str | None
    ids: npt.NDArray[Any]
    end: bool
    entry: FileReport


class _Reading:
    """Reads the files any number of times and checks the ids."""

    def __init__(self, tokens: TokenInput, vocab_size: int, eos: int, limit: int | None, progress: "Progress") -> None:
        self._tokens, self._vocab_size, self._eos, self._limit = tokens, vocab_size, eos, limit
        self._progress = progress
        self.ids = 0
        """Ids of this pass so far, without eos at the ends of documents."""
        self.documents = 0
        """Documents of this pass so far, of which there are at most `limit`; without those of files for the held-out split."""

    def parts(self, phase: str, report: PrepareReport) -> Iterator[_Part]:
        """The documents in order, recorded in the report if they are empty. Raises `DataError`."""
        self._progress.phase(phase, self._tokens.size)
        section = report.source(self._tokens.name)
        self.ids, self.documents, consumed = 0, 0, 0
        for file in self._tokens.files:
            limited = file.split != "heldout"
            if limited and self.documents == self._limit:
                continue
            entry, number, length, read = section.file(file.key), 0, 0, 0
            self._tokens.require_unchanged(file)
            for ids, end in file.chunks(self._eos, entry):
                self._check(file, ids, read)
                read, consumed = read + len(ids), consumed + ids.nbytes
                self._progress.update(min(consumed, self._tokens.size), self.documents)
                if end and len(ids) and ids[-1] == self._eos:
                    ids = ids[:-1]
                length, self.ids = length + len(ids), self.ids + len(ids)
                if length:
                    yield _Part(f"{file.key}:{number}", file.split, ids, end, entry)
                if not end:
                    continue
                if length:
                    self.documents += limited
                else:
                    entry.skip("empty document", f"document {number}")
                number, length = number + 1, 0
                if limited and self.documents == self._limit:
                    break
            self._tokens.require_unchanged(file)

    def _check(self, file: TokenFile, ids: npt.NDArray[Any], before: int) -> None:
        if not len(ids) or (ids.min() >= 0 and ids.max() < self._vocab_size):
            return
        at = int(np.argmax((ids < 0) | (ids >= self._vocab_size)))
        raise DataError(
            f"{file.paths()[0]}: id {ids[at]} (number {before + at} of the file) is outside the tokenizer's vocabulary of "
            f"{self._vocab_size}; name the tokenizer that made the ids with --tokenizer, or check --token-dtype"
        )


def _choose_rule(reading: _Reading, heldout: float) -> SplitRule | None:
    """How documents are divided; None if every file is for a given split. Raises `DataError` if there is nothing to divide."""
    report = PrepareReport()
    parts = reading.parts("scanning the ids", report)
    first = next(parts, None)
    if first is None:
        raise DataError(f"there are no ids: {report.skipped_in_words()}; name files that contain token ids")
    if first.split is not None:
        return None
    keys = (part.key for part in _with_first(first, parts) if part.end)
    rule = rule_for_keys(keys, heldout)
    assert rule is not None
    if rule.single and reading.ids < 2:
        raise DataError("there is a single id, too few for a held-out split; name more ids")
    return rule


def _with_first(first: _Part, others: Iterator[_Part]) -> Iterator[_Part]:
    yield first
    yield from others


def _placed(parts: Iterator[_Part], rule: SplitRule | None, n_ids: int) -> Iterator[_Part]:
    """The parts with their splits. A single document of `n_ids` ids is divided near 1 - heldout."""
    if rule is None:
        yield from parts
        return
    left = min(max(round(n_ids * (1 - rule.heldout)), 1), n_ids - 1)
    for part in parts:
        if not rule.single:
            yield _Part(part.key, rule.split_of(part.key), part.ids, part.end, part.entry)
            continue
        if left:
            head, rest = part.ids[:left], part.ids[left:]
            left -= len(head)
            yield _Part(part.key, "train", head, left == 0, part.entry)
            part = _Part(part.key, None, rest, part.end, part.entry)
        if not left and (len(part.ids) or part.end):
            yield _Part(part.key, "heldout", part.ids, part.end, part.entry)


class ByteCounter:
    """Counts the UTF-8 bytes of the text of ids, without special tokens: a store records them for bits per byte.

    Exact for byte-level tokenizers, by a table. Others decode the ids in pieces, which can be off by a byte or two per piece.
    """

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        self._table = _bytes_per_token(tokenizer)

    def __call__(self, ids: npt.NDArray[Any]) -> int:
        if self._table is not None:
            return int(self._table[ids].sum())
        pieces = (ids[at : at + _DECODED_IDS].tolist() for at in range(0, len(ids), _DECODED_IDS))
        return sum(len(self._tokenizer.decode(piece, skip_special_tokens=True).encode("utf-8")) for piece in pieces)


def _bytes_per_token(tokenizer: "Tokenizer") -> npt.NDArray[np.int64] | None:
    """Bytes of each token [vocab_size] of a byte-level tokenizer, whose tokens have one character per byte; else None."""
    from tokenizers.pre_tokenizers import ByteLevel

    if (json.loads(tokenizer.to_str()).get("decoder") or {}).get("type") != "ByteLevel":
        return None
    alphabet = set(ByteLevel.alphabet())
    table = np.zeros(vocabulary_size(tokenizer), dtype=np.int64)
    for token, index in tokenizer.get_vocab(with_added_tokens=True).items():
        table[index] = len(token) if alphabet.issuperset(token) else len(token.encode("utf-8"))
    for index, added in tokenizer.get_added_tokens_decoder().items():
        if added.special:
            table[index] = 0
    return table
