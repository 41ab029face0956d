"""The implementation of `boost prepare`: sources -> tokenizer -> token store.

`sources.py` reads the sources, `split.py` decides which documents are held out, `encode.py` turns text into tokens, `writer.py`
publishes a store atomically. A run that was killed continues from its last commit; its store is byte-for-byte identical
to that of an uninterrupted run.
"""

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from boost.data.encode import Encoder, split_text
from boost.data.options import PrepareOptions, Progress
from boost.data.sources import Reading, open_sources
from boost.data.split import SplitRule, choose_split
from boost.data.store import FORMAT, TokenStore, token_dtype
from boost.data.tokenizer import (
    END_OF_TEXT,
    find_eos,
    load_tokenizer,
    parse_tokenizer,
    parse_training,
    tokenizer_fingerprint,
    tokenizer_identity,
    train_tokenizer,
    vocabulary_size,
)
from boost.data.writer import TokenWriter, Unfinished, new_store, save_progress
from boost.errors import DataError
from boost.version import __version__

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["PrepareOptions", "PrepareResult", "Progress", "prepare"]

# The merges in a vocabulary converge long before this much text is read. More text would only cost time and memory.
TRAINING_CHARS = 1 << 30

COMMIT_S = 30.0
"""Seconds between commits: the most work that a kill can lose."""
COMMIT_PAUSE = 20.0
"""Minimum pause between commits, relative to the duration of a commit: commits take at most a twentieth of the time."""


@dataclass(frozen=True)
class PrepareResult:
    """The finished store, whether it already existed, and the seconds it took."""

    store: TokenStore
    up_to_date: bool
    seconds: float


def prepare(options: PrepareOptions, progress: Progress | None = None) -> PrepareResult:
    """Builds the token store `options.out`; does nothing if it is up to date.

    Raises `DataError` for invalid input and, without `overwrite`, for an existing store made from different input; `StorageError`
    if the disk is full. On any error, an existing store is unchanged, and no incomplete store is left at `options.out`. If the run
    was killed, or a stream or the disk failed, the same options continue from the last commit (`COMMIT_S`).
    """
    started = time.monotonic()
    progress = progress or Progress()
    sources, heldout = open_sources(options)
    made_from = {  # everything that a store depends on; for files: names, sizes and modification times, not contents
        "format": FORMAT,
        "version": __version__,
        "sources": [[type(source).__name__, source.fingerprint()] for source in sources],
        "heldout": [[type(source).__name__, source.fingerprint()] for source in heldout],
        "tokenizer": tokenizer_identity(options.tokenizer, options.eos),
        "options": [options.eos, options.text_field, options.heldout],
        "limits": [options.max_documents, options.max_tokens, options.max_heldout_tokens],
    }
    fingerprint = hashlib.sha256(json.dumps(made_from).encode()).hexdigest()
    with new_store(options.out, fingerprint, options.overwrite) as unfinished:
        if unfinished is not None:
            with contextlib.closing(progress):
                reading = Reading(sources, heldout, options.max_documents, progress)
                _build(options, reading, fingerprint, unfinished)
    return PrepareResult(TokenStore.open(options.out), unfinished is None, time.monotonic() - started)


def _build(options: PrepareOptions, reading: Reading, fingerprint: str, unfinished: Unfinished) -> None:
    """Reads the sources and fills the folder of a new store, or continues where an interrupted run committed."""
    folder, saved = unfinished.folder, unfinished.saved
    if saved is None:
        rule, tokenizer, eos, notes = _begin(options, reading)
    else:
        moved = saved["rule"]["moved"]
        rule = SplitRule(**{**saved["rule"], "moved": tuple(moved) if moved else None})
        tokenizer, eos = parse_tokenizer(saved["tokenizer"]), tuple(saved["eos"])
        notes = saved["notes"]
    decided = {"rule": asdict(rule), "tokenizer": tokenizer.to_str(), "eos": list(eos), "fingerprint": fingerprint}
    decided["notes"] = notes
    size = vocabulary_size(tokenizer)
    wanted = {"train": options.max_tokens, "heldout": options.max_heldout_tokens}
    limits = {name: limit for name, limit in wanted.items() if limit is not None}
    with TokenWriter(folder, token_dtype(size), saved and saved["written"]) as writer:
        encoder = Encoder(tokenizer, eos[1], writer, reading.update_progress, limits)
        encoder.counts.update(saved["counts"] if saved else {})
        next_commit = time.monotonic() + COMMIT_S
        phase = "encoding" if saved is None else "encoding, continued"
        for document in reading.documents(phase, encoder.is_full, saved["position"] if saved else ()):
            for name, text in rule.parts(document):
                encoder.add(document.entry, name, text)
            if time.monotonic() >= next_commit:
                encoder.flush()
                begun = time.monotonic()
                committed = {"written": writer.commit(), "position": reading.position(), "counts": encoder.counts}
                save_progress(folder, {**decided, **committed})
                now = time.monotonic()
                next_commit = now + max(COMMIT_S, COMMIT_PAUSE * (now - begun))
        encoder.flush()
        report = reading.report
        for name, sizes in writer.sizes.items():
            if not sizes["documents"]:
                why = "--max-tokens came first" if encoder.is_full("train") else report.skipped_in_words()
                raise DataError(
                    f"the {'held-out' if name == 'heldout' else 'training'} text is empty: {why}; "
                    + ("raise --max-tokens or --heldout" if options.max_tokens else "pass files that contain text")
                )
        report.notes += [*notes, *_notes(options, rule, encoder, reading)]
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


def _begin(options: PrepareOptions, reading: Reading) -> tuple[SplitRule, "Tokenizer", tuple[str, int], list[str]]:
    """Decides the split, loads or trains the tokenizer, and finds its end-of-document token. Returns them and notes on the
    tokenizer."""
    rule: SplitRule | None = SplitRule(options.heldout)
    if not reading.separate:
        rule = choose_split((document.key for document in reading.documents("scanning the input")), options.heldout)
    if rule is None:
        raise DataError(f"the corpus is empty: {reading.report.skipped_in_words()}; pass files that contain text")
    vocab_size, notes = parse_training(options.tokenizer), list[str]()
    if vocab_size is None:
        tokenizer = load_tokenizer(options.tokenizer, notes)
        eos = find_eos(tokenizer, options.eos, options.tokenizer)
    else:
        tokenizer = train_tokenizer(_train_pieces(reading, rule), vocab_size, options.eos or END_OF_TEXT)
        eos = find_eos(tokenizer, options.eos or END_OF_TEXT)
        if (size := vocabulary_size(tokenizer)) < vocab_size:
            notes.append(
                f"the train split has too few repeated sequences for a vocabulary of {vocab_size} tokens; the tokenizer has {size}"
            )
    return rule, tokenizer, eos, notes


def _notes(options: PrepareOptions, rule: SplitRule, encoder: Encoder, reading: Reading) -> list[str]:
    """Notes for the user, in addition to the numbers."""
    counts, stops = encoder.counts, encoder.is_full("train")
    unknown, dropped = counts["unknown"], counts["dropped"]
    notes = {
        "the corpus is a single document, so its last part is held out, starting after a line break if possible": rule.single,
        f"count of the unknown token: {unknown}; the tokenizer cannot represent all of the text": unknown,
        f"characters that the tokenizer has no token for, dropped: {dropped}; choose another tokenizer": dropped,
        f"text that spells a special token, encoded as ordinary tokens: {counts['spelled']}": counts["spelled"],
        f"text that the tokenizer cannot tell from a special token, such as the end of a document: {counts['forged']}; use "
        "another --eos": counts["forged"],
        f"only the first {reading.taken} documents were read (--max-documents)": reading.taken == options.max_documents,
        f"stopped at the document that reached {options.max_tokens} training tokens (--max-tokens)": stops,
        f"the input has fewer than {options.max_tokens} training tokens (--max-tokens)": (
            options.max_tokens is not None and not stops
        ),
    }
    return [note for note, applies in notes.items() if applies]


def _train_pieces(reading: Reading, rule: SplitRule) -> Iterator[str]:
    """Yields the train split's text in pieces, at most `TRAINING_CHARS` characters in total, for training a tokenizer. Held-out
    text must not affect the vocabulary."""
    limit = TRAINING_CHARS
    for document in reading.documents("training the tokenizer"):
        for name, text in rule.parts(document):
            left = len(text)
            for piece in split_text(text) if name == "train" else ():
                if limit <= 0:
                    return
                yield piece
                limit -= len(piece)
                left -= len(piece)
                if left:
                    reading.update_progress(left)
