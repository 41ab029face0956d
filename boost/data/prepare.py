"""`boost prepare` without its command line: sources -> tokenizer -> token store, once per input.

`split.py` says which documents are held out, `encode.py` how text becomes tokens, `writer.py` how a store appears.
"""

import hashlib
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

from boost.data.encode import Encoder, cut
from boost.data.readers import Document, ReadsAlike
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

# The merges of a vocabulary settle long before this much text; more costs time and memory for nothing.
TRAINING_CHARS = 1 << 30


@dataclass(frozen=True)
class PrepareOptions:
    """What one preparation is: inputs, where to, and how."""

    out: Path
    """Folder of the token store."""
    inputs: tuple[str, ...] = ()
    """Text, JSONL or Parquet files, or folders of them."""
    stdlib: bool = False
    """Read the Python standard library of this machine."""
    hf: str | None = None
    """NAME or NAME:CONFIG of a Hugging Face data set."""
    hf_split: str = "train"
    """Split of the data set; all of it becomes the corpus, from which `heldout` is taken."""
    tokenizer: str = "train:4096"
    """`train:SIZE`, a tokenizer.json or its folder, or a tokenizer's name on the Hugging Face hub."""
    eos: str | None = None
    """End-of-document token; guessed when None."""
    text_field: str = "text"
    """Field or column of JSONL, Parquet and data sets that holds the text."""
    heldout: float = 0.02
    """Fraction of the documents to hold out, between 0 and 1 without its ends."""
    max_documents: int | None = None
    """Stop after this many documents."""
    overwrite: bool = False
    """Replace an existing store made of other input."""


@dataclass(frozen=True)
class PrepareResult:
    """The finished store, whether it was there already, and the seconds it took."""

    store: TokenStore
    up_to_date: bool
    seconds: float


class Progress:
    """Progress callbacks of `prepare`; this base class does nothing."""

    def phase(self, name: str, total: int | None) -> None:
        """A phase begins; `total` is the bytes of input it will pass, None when unknown."""

    def update(self, consumed: int, documents: int) -> None:
        """So many bytes of input and documents have passed in this phase."""

    def close(self) -> None:
        """No more phases, be it for an error."""


def prepare(options: PrepareOptions, progress: Progress | None = None) -> PrepareResult:
    """Makes the token store `options.out`, or finds that it is up to date and leaves it alone.

    Raises `DataError` for bad input, or for an existing store of other input without `overwrite`; `StorageError` when
    the disk is full. Whatever is raised, an existing store is as it was and no unfinished one has its name.
    """
    started = time.monotonic()
    progress = progress or Progress()
    _check_options(options)
    sources = open_sources(
        options.inputs,
        stdlib=options.stdlib,
        hf=options.hf,
        hf_split=options.hf_split,
        text_field=options.text_field,
    )
    fingerprint = input_fingerprint(options, sources)
    out = options.out
    fresh = (out / STORE_FILE).exists() and _is_current(options, fingerprint)
    if not fresh:
        with locked(out):
            # Checked again under the lock: another process may have restored an older store or finished a new one.
            fresh = _is_current(options, fingerprint)
            if not fresh:
                try:
                    with new_store(out) as folder:
                        _build(options, sources, fingerprint, folder, progress)
                finally:
                    progress.close()
    return PrepareResult(TokenStore.open(out), fresh, time.monotonic() - started)


def _check_options(options: PrepareOptions) -> None:
    if not 0.0 < options.heldout < 1.0:
        raise DataError(f"--heldout {options.heldout}: must be a fraction between 0 and 1, as 0.05")
    if options.max_documents is not None and options.max_documents < 1:
        raise DataError(f"--max-documents {options.max_documents}: must be at least 1")
    if options.out.name in ("", ".."):
        raise DataError(f"--out {options.out}: must name a folder, as data/mine")
    parse_training(options.tokenizer)


def input_fingerprint(options: PrepareOptions, sources: Iterable[Source]) -> str:
    """sha256 (hex) of everything the store depends on, from names, sizes and times of files, not their contents."""
    tokenizer = Path(options.tokenizer)
    tokenizer = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    content = {
        "format": FORMAT,
        "sources": [[type(source).__name__, source.fingerprint()] for source in sources],
        "tokenizer": hashlib.sha256(tokenizer.read_bytes()).hexdigest() if tokenizer.is_file() else options.tokenizer,
        "options": [options.eos, options.text_field, options.heldout, options.max_documents],
    }
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _is_current(options: PrepareOptions, fingerprint: str) -> bool:
    """Whether the store is there and made of this input. Raises `DataError` when it may not be replaced."""
    out = options.out
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    if not (out / STORE_FILE).is_file():
        # Never replaced, not even with --overwrite: it may be somebody's folder of texts.
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
            f"{out}: a token store of other input or options is there; add --overwrite to replace it, "
            f"or choose another --out"
        )
    return False


def _build(options: PrepareOptions, sources: list[Source], fingerprint: str, folder: Path, progress: Progress) -> None:
    """Reads the sources and fills the folder of a new store."""
    sizes = [source.size for source in sources]
    total = None if None in sizes else sum(size for size in sizes if size is not None)
    reading = _Reading(sources, options.max_documents, total, progress)
    rule = choose_split(reading.documents("looking at the input"), options.heldout)
    if rule is None:
        raise DataError(f"the corpus is empty: {reading.report.skipped_in_words()}; give files that hold text")
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
        encoder = Encoder(tokenizer, writer, reading.working)
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
    options: PrepareOptions, rule: SplitRule, asked: int | None, size: int, unknown: int, report: PrepareReport
) -> list[str]:
    """Notes for the user, in addition to the numbers."""
    notes = []
    if asked is not None and size < asked:
        notes.append(f"the train split holds too few repetitions for {asked} tokens: the vocabulary has {size}")
    if rule.single:
        notes.append("the corpus is one document: its last part is held out, split at a line break if there is one")
    if unknown:
        notes.append(f"{unknown} tokens are the tokenizer's unknown token: it cannot represent all of this text")
    documents = sum(entry.documents for source in report.sources for entry in source.files)
    if documents == options.max_documents:
        notes.append(f"only the first {documents} documents were taken, as --max-documents asked")
    return notes


class _Reading:
    """Reads the sources any number of times, each time with a fresh report and a phase of the progress display."""

    def __init__(self, sources: list[Source], limit: int | None, total: int | None, progress: Progress) -> None:
        self._sources, self._limit, self._total, self._progress = sources, limit, total, progress
        self.report = PrepareReport()
        self._taken = 0
        self._alike = ReadsAlike()

    def documents(self, phase: str) -> Iterator[Document]:
        self.report = report = PrepareReport()
        self._progress.phase(phase, self._total)
        everything = (document for source in self._sources for document in source.documents(report))
        self._taken = 0
        for document in self._alike.watch(islice(everything, self._limit)):
            self._taken += 1
            yield document
            self._progress.update(report.consumed, self._taken)

    def working(self, left: int) -> None:
        """Shows progress within a long document with about `left` bytes remaining."""
        self._progress.update(max(self.report.consumed - left, 0), self._taken)


def _train_pieces(reading: _Reading, rule: SplitRule) -> Iterator[str]:
    """The train split's text in pieces, for training a tokenizer: held-out text must not shape the vocabulary."""
    for document in reading.documents("training the tokenizer"):
        for name, text in rule.parts(document):
            left = len(text)
            for piece in cut(text) if name == "train" else ():
                yield piece
                left -= len(piece)
                if left:
                    reading.working(left)


def _up_to(pieces: Iterable[str], limit: int) -> Iterator[str]:
    for piece in pieces:
        if limit <= 0:
            return
        yield piece
        limit -= len(piece)
