"""The implementation of `boost prepare`: sources -> tokenizer -> token store, once per input.

`split.py` decides which documents are held out, `encode.py` turns text into tokens, `writer.py` publishes a store atomically.
"""

import hashlib
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

from boost.data.documents import Document
from boost.data.encode import Encoder, split_text
from boost.data.from_tokens import TokenInput, build_from_tokens
from boost.data.readers import ConsistentPasses
from boost.data.report import PrepareReport
from boost.data.sources import Source, open_sources
from boost.data.split import SplitRule, choose_split
from boost.data.store import FORMAT, STORE_FILE, TokenStore, read_meta, token_dtype
from boost.data.tokenizer import (
    END_OF_TEXT,
    find_eos,
    load_tokenizer,
    parse_training,
    tokenizer_fingerprint,
    train_tokenizer,
    vocabulary_size,
)
from boost.data.writer import TokenWriter, locked, new_store
from boost.errors import DataError

# The merges of a vocabulary converge long before this much text. More would only cost time and memory.
TRAINING_CHARS = 1 << 30


@dataclass(frozen=True)
class PrepareOptions:
    """Options of `boost prepare`."""

    out: Path
    """Folder of the token store."""
    inputs: tuple[str, ...] = ()
    """Text, JSONL or Parquet files, or folders of them."""
    stdlib: bool = False
    """Read the Python standard library of this machine."""
    hf: str | None = None
    """NAME or NAME:CONFIG of a Hugging Face dataset."""
    hf_split: str = "train"
    """Split of the dataset to read. The whole split becomes the corpus; `heldout` is taken from it."""
    from_tokens: str | None = None
    """Token ids that another tool wrote (`boost.data.token_files`), instead of text."""
    token_dtype: str = "uint16"
    """`uint16` or `uint32`: type of the ids in a .bin file without a header."""
    tokenizer: str = "train:4096"
    """`train:SIZE`, a tokenizer.json or its folder, or a tokenizer's name on the Hugging Face Hub."""
    eos: str | None = None
    """End-of-document token; None: found by its usual names, such as </s>."""
    text_field: str | None = None
    """Field or column with the text; None: `text`, `content`, or the only one that holds strings."""
    heldout: float = 0.02
    """Fraction of the documents to hold out, between 0 and 1."""
    max_documents: int | None = None
    """Stop after this many documents."""
    overwrite: bool = False
    """Replace an existing store that was made from different input."""


@dataclass(frozen=True)
class PrepareResult:
    """The finished store, whether it already existed, and the seconds it took."""

    store: TokenStore
    up_to_date: bool
    seconds: float


class Progress:
    """Progress callbacks of `prepare`; this base class does nothing."""

    def phase(self, name: str, total: int | None) -> None:
        """A phase begins. `total`: input bytes that it will read; None if unknown."""

    def update(self, consumed: int, documents: int) -> None:
        """Input bytes and documents processed so far in this phase."""

    def close(self) -> None:
        """The last phase is done, or an error occurred."""


def prepare(options: PrepareOptions, progress: Progress | None = None) -> PrepareResult:
    """Builds the token store `options.out`; does nothing if it is up to date.

    Raises `DataError` for invalid input and, without `overwrite`, for an existing store made from different input; `StorageError`
    if the disk is full. On any error, an existing store is unchanged, and no incomplete store is left at `options.out`.
    """
    started = time.monotonic()
    progress = progress or Progress()
    _check_options(options)
    tokens = TokenInput(options) if options.from_tokens is not None else None
    sources = (
        []
        if tokens
        else open_sources(
            options.inputs,
            stdlib=options.stdlib,
            hf=options.hf,
            hf_split=options.hf_split,
            text_field=options.text_field,
        )
    )
    fingerprint = input_fingerprint(options, [tokens] if tokens else sources)
    out = options.out
    fresh = (out / STORE_FILE).exists() and _is_current(options, fingerprint)
    if not fresh:
        with locked(out):
            # Checked again under the lock: another process may have restored an older store or finished a new one.
            fresh = _is_current(options, fingerprint)
            if not fresh:
                try:
                    with new_store(out) as folder:
                        if tokens:
                            build_from_tokens(options, tokens, fingerprint, folder, progress)
                        else:
                            _build(options, sources, fingerprint, folder, progress)
                finally:
                    progress.close()
    return PrepareResult(TokenStore.open(out), fresh, time.monotonic() - started)


def _check_options(options: PrepareOptions) -> None:
    if not 0.0 < options.heldout < 1.0:
        raise DataError(f"--heldout {options.heldout}: must be a fraction between 0 and 1, such as 0.05")
    if options.max_documents is not None and options.max_documents < 1:
        raise DataError(f"--max-documents {options.max_documents}: must be at least 1")
    if options.out.name in ("", ".."):
        raise DataError(f"--out {options.out}: must name a folder, such as data/mine")
    parse_training(options.tokenizer)


def input_fingerprint(options: PrepareOptions, sources: Iterable[Source | TokenInput]) -> str:
    """sha256 (hex) of everything that the store depends on: names, sizes and modification times of files, not their contents."""
    tokenizer = Path(options.tokenizer)
    tokenizer = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    content = {
        "format": FORMAT,
        "sources": [[type(source).__name__, source.fingerprint()] for source in sources],
        "tokenizer": hashlib.sha256(tokenizer.read_bytes()).hexdigest() if tokenizer.is_file() else options.tokenizer,
        "options": [options.eos, options.text_field or "text", options.heldout, options.max_documents],
    }
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _is_current(options: PrepareOptions, fingerprint: str) -> bool:
    """Whether the store exists and was made from this input. Raises `DataError` if it may not be replaced."""
    out = options.out
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    if not (out / STORE_FILE).is_file():
        # Never replaced, not even with --overwrite: it may be a user's folder of texts.
        raise DataError(f"{out}: exists and is not a token store; choose another --out")
    try:
        same = read_meta(out)["input_fingerprint"] == fingerprint
        if same:
            TokenStore.open(out)
            return True
    except DataError:
        if not options.overwrite:
            raise
    if not options.overwrite:
        raise DataError(
            f"{out}: already holds a token store made from different input or options; add --overwrite to replace it, "
            f"or choose another --out"
        )
    return False


def _build(options: PrepareOptions, sources: list[Source], fingerprint: str, folder: Path, progress: Progress) -> None:
    """Reads the sources and fills the folder of a new store."""
    sizes = [source.size for source in sources]
    total = None if None in sizes else sum(size for size in sizes if size is not None)
    reading = _Reading(sources, options.max_documents, total, progress)
    rule = choose_split(reading.documents("scanning the input"), options.heldout)
    if rule is None:
        raise DataError(f"the corpus is empty: {reading.report.skipped_in_words()}; name files that contain text")
    vocab_size = parse_training(options.tokenizer)
    if vocab_size is None:
        tokenizer = load_tokenizer(options.tokenizer)
        spec = Path(options.tokenizer)
        eos = find_eos(tokenizer, options.eos, spec if spec.is_dir() else spec.parent if spec.is_file() else None)
    else:
        pieces = _up_to(_train_pieces(reading, rule), TRAINING_CHARS)
        tokenizer = train_tokenizer(pieces, vocab_size, options.eos or END_OF_TEXT)
        eos = find_eos(tokenizer, options.eos or END_OF_TEXT)
    size = vocabulary_size(tokenizer)
    with TokenWriter(folder, token_dtype(size), eos[1]) as writer:
        encoder = Encoder(tokenizer, writer, reading.update_progress)
        for document in reading.documents("encoding"):
            for name, text in rule.parts(document):
                encoder.add(document.entry, name, text)
        encoder.flush()
        report = reading.report
        report.notes += _notes(options, rule, vocab_size, size, encoder.unknown, report)
        meta = {
            "format": FORMAT,
            "vocab_size": size,
            "eos": {"token": eos[0], "id": eos[1]},
            "tokenizer_fingerprint": tokenizer_fingerprint(tokenizer),
            "input_fingerprint": fingerprint,
            "options": {**asdict(options), "out": str(options.out)},
            "report": report.summary(),
        }
        writer.finish(tokenizer.to_str(), meta, report.details())


def _notes(
    options: PrepareOptions, rule: SplitRule, requested: int | None, size: int, unknown: int, report: PrepareReport
) -> list[str]:
    """Notes for the user, in addition to the numbers."""
    notes = []
    if requested is not None and size < requested:
        notes.append(
            f"the train split has too few repeated sequences for {requested} tokens: the vocabulary has {size} tokens"
        )
    if rule.single:
        notes.append("the corpus is one document: its last part is held out, split at a line break if there is one")
    if unknown:
        notes.append(f"{unknown} tokens are the unknown token: the tokenizer cannot represent all of the text")
    documents = sum(entry.documents for source in report.sources for entry in source.files)
    if documents == options.max_documents:
        notes.append(f"only the first {documents} documents were read (--max-documents)")
    return notes


class _Reading:
    """Reads the sources any number of times, each time with a fresh report and a phase of the progress display."""

    def __init__(self, sources: list[Source], limit: int | None, total: int | None, progress: Progress) -> None:
        self._sources, self._limit, self._total, self._progress = sources, limit, total, progress
        self.report = PrepareReport()
        self._taken = 0
        self._passes = ConsistentPasses()

    def documents(self, phase: str) -> Iterator[Document]:
        self.report = report = PrepareReport()
        self._progress.phase(phase, self._total)
        everything = (document for source in self._sources for document in source.documents(report))
        self._taken = 0
        for document in self._passes.check(islice(everything, self._limit)):
            self._taken += 1
            yield document
            self._progress.update(report.consumed, self._taken)

    def update_progress(self, left: int) -> None:
        """Shows progress within a long document with about `left` bytes remaining."""
        self._progress.update(max(self.report.consumed - left, 0), self._taken)


def _train_pieces(reading: _Reading, rule: SplitRule) -> Iterator[str]:
    """The train split's text in pieces, for training a tokenizer: held-out text must not affect the vocabulary."""
    for document in reading.documents("training the tokenizer"):
        for name, text in rule.parts(document):
            left = len(text)
            for piece in split_text(text) if name == "train" else ():
                yield piece
                left -= len(piece)
                if left:
                    reading.update_progress(left)


def _up_to(pieces: Iterable[str], limit: int) -> Iterator[str]:
    for piece in pieces:
        if limit <= 0:
            return
        yield piece
        limit -= len(piece)
