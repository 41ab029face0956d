"""The implementation of `boost prepare`: sources -> tokenizer -> token store.

`reading.py` reads the sources, `split.py` decides which documents are held out, `encode.py` turns text into tokens, `writer.py`
publishes a store atomically. A run that was killed continues from its last commit; its store is byte-for-byte identical
to that of an uninterrupted run.
"""

import hashlib
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from boost.data.encode import Encoder, split_text
from boost.data.from_tokens import TokenInput, build_from_tokens
from boost.data.hub import HubSource
from boost.data.options import PrepareOptions, Progress
from boost.data.reading import Reading
from boost.data.sources import FilesSource, Source, StdlibSource
from boost.data.split import SplitRule, choose_split
from boost.data.store import FORMAT, STORE_FILE, TokenStore, read_meta, token_dtype
from boost.data.tokenizer import (
    END_OF_TEXT,
    find_eos,
    load_tokenizer,
    parse_tokenizer,
    parse_training,
    tokenizer_fingerprint,
    train_tokenizer,
    vocabulary_size,
)
from boost.data.writer import TokenWriter, locked, new_store, read_progress, remove, save_progress, sibling, store_meta
from boost.errors import DataError
from boost.format import format_count
from boost.text import JsonObject
from boost.version import __version__

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["PrepareOptions", "PrepareResult", "Progress", "input_fingerprint", "prepare"]

# The merges in a vocabulary converge long before this much text is read. More text would only cost time and memory.
TRAINING_CHARS = 1 << 30

_TOKENIZER_FILES = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"

COMMIT_S = 30.0
"""Seconds between commits: the most work that a kill can lose."""
COMMIT_PAUSE = 20.0
"""Minimum pause between commits, relative to the duration of a commit: commits take at most a twentieth of the time."""


_NOT_FOR_TOKENS = (
    "inputs", "stdlib", "hf", "text_field", "heldout_split", "max_documents", "max_tokens", "max_heldout_tokens",
)  # fmt: skip
"""Options that token files do not support. Passing one is an error, so that none is silently ignored."""


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
    _check_options(options)
    tokens = TokenInput(options) if options.from_tokens is not None else None
    sources, heldout = ([], []) if tokens else _open_sources(options)
    fingerprint = input_fingerprint(options, [tokens] if tokens else sources, heldout)
    out = options.out
    fresh = (out / STORE_FILE).exists() and _is_current(options, fingerprint)
    if not fresh:
        with locked(out):
            # Checked again under the lock: another process may have restored an older store or finished a new one.
            fresh = _is_current(options, fingerprint)
            if not fresh:
                saved = _progress_of(options, fingerprint)
                try:
                    with new_store(out) as folder:
                        reading = Reading(sources, heldout, options.max_documents, progress)
                        if tokens:
                            build_from_tokens(options, tokens, fingerprint, folder, progress)
                        else:
                            _build(options, reading, fingerprint, folder, saved)
                finally:
                    progress.close()
    return PrepareResult(TokenStore.open(out), fresh, time.monotonic() - started)


def _open_sources(options: PrepareOptions) -> tuple[list[Source], list[Source]]:
    """Returns the sources of text and of the held-out split (none if it is a fraction of the documents). Raises `DataError`."""
    sources: list[Source] = []
    heldout: list[Source] = []
    seen = set[str]()
    if options.heldout_split is None:
        heldout += [FilesSource(path, options.text_field, seen) for path in options.heldout_from]
    elif options.hf is None or options.heldout_from:
        problem = "conflicts with --heldout-from; use one of them" if options.heldout_from else "needs --hf"
        raise DataError(f"--heldout-split {options.heldout_split} {problem}")
    elif options.heldout_split == options.hf_split:
        raise DataError(f"--heldout-split {options.heldout_split} is also the training split; choose another split")
    else:
        heldout.append(HubSource(options.hf, options.heldout_split, options.text_field or "text", options.hf_revision))
    if options.stdlib:
        sources.append(StdlibSource())
    sources += [FilesSource(path, options.text_field, seen) for path in options.inputs]
    if options.hf is not None:
        sources.append(HubSource(options.hf, options.hf_split, options.text_field or "text", options.hf_revision))
    if sources:
        return sources, heldout
    raise DataError(
        "no input given; pass text, JSON, Parquet or Arrow files, --hf NAME, or --stdlib for a corpus without files"
    )


def _progress_of(options: PrepareOptions, fingerprint: str) -> JsonObject | None:
    """What an interrupted run of the same command has committed. Raises `DataError` if the interrupted command was different."""
    saved = read_progress(options.out)
    if saved is None or saved["fingerprint"] == fingerprint:
        return saved
    if not options.overwrite:
        tokens = sum(sizes["tokens"] for sizes in saved["written"]["sizes"].values())
        raise DataError(
            f"{options.out}: an interrupted 'boost prepare' with other input or options wrote {format_count(tokens)} tokens; "
            f"repeat its command to continue, add --overwrite to discard them, or choose another --out"
        )
    remove(sibling(options.out, "tmp"))
    return None


def _check_options(options: PrepareOptions) -> None:
    if not 0.0 < options.heldout < 1.0:
        raise DataError(f"--heldout {options.heldout} must be a fraction between 0 and 1, such as 0.05")
    for flag in ("max_documents", "max_tokens", "max_heldout_tokens"):
        if (value := getattr(options, flag)) is not None and value < 1:
            raise DataError(f"--{flag.replace('_', '-')} {value} must be at least 1")
    if options.out.name in ("", ".."):
        raise DataError(f"--out {options.out} must name a folder, such as data/mine")
    training = parse_training(options.tokenizer)
    if options.hf_revision is not None and options.hf is None:
        raise DataError(f"--hf-revision {options.hf_revision} has no effect without --hf; remove it")
    unused = [f"--{flag.replace('_', '-')}" for flag in _NOT_FOR_TOKENS if getattr(options, flag)]
    if options.from_tokens and unused:
        flags = " and ".join(unused).replace("--inputs", "INPUT")
        raise DataError(f"--from-tokens cannot be combined with {flags}; remove one of them")
    if options.from_tokens and training:
        raise DataError(
            f"--from-tokens {options.from_tokens} needs the tokenizer that produced the ids; pass it with --tokenizer, such as "
            "gpt2 or its tokenizer.json"
        )


def tokenizer_identity(options: PrepareOptions) -> dict[str, str]:
    """sha256 (hex) of everything that decides tokens, by name: files of a local tokenizer (tokenizer.json, its configuration and
    special tokens), or the content of a tokenizer on the Hub. Empty for `train:SIZE`. Raises `DataError`."""
    path = Path(options.tokenizer)
    if parse_training(options.tokenizer) is not None:
        return {}
    if not path.exists():
        tokenizer = load_tokenizer(options.tokenizer, [])
        eos, _ = find_eos(tokenizer, options.eos, options.tokenizer)
        return {"tokenizer": tokenizer_fingerprint(tokenizer), "eos": eos}
    folder = path if path.is_dir() else path.parent
    files = {path} if path.is_file() else set()
    files |= {folder / name for name in _TOKENIZER_FILES}
    return {
        file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(files)
        if file.is_file()
    }


def input_fingerprint(
    options: PrepareOptions, sources: Iterable[Source | TokenInput], heldout: Iterable[Source] = ()
) -> str:
    """sha256 (hex) of everything that the store depends on; for input files, names, sizes and modification times, not contents."""
    content = {
        "format": FORMAT,
        "version": __version__,
        "sources": [[type(source).__name__, source.fingerprint()] for source in sources],
        "tokenizer": tokenizer_identity(options) or options.tokenizer,
        "options": [options.eos, options.text_field, options.heldout, options.max_documents],
    }
    if options.max_tokens is not None or options.max_heldout_tokens is not None:
        content["limits"] = [options.max_tokens, options.max_heldout_tokens]
    if from_heldout := [[type(source).__name__, source.fingerprint()] for source in heldout]:
        content["heldout"] = from_heldout
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _is_current(options: PrepareOptions, fingerprint: str) -> bool:
    """Whether the store exists and was made from this input. Raises `DataError` if it may not be replaced."""
    out = options.out
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    if not (out / STORE_FILE).is_file():
        # Never replaced, not even with --overwrite: it may be a user's folder of texts.
        raise DataError(f"{out} exists but is not a token store; choose another --out")
    try:
        if read_meta(out)["input_fingerprint"] == fingerprint:
            TokenStore.open(out)
            return True
    except DataError:
        if not options.overwrite:
            raise
    if not options.overwrite:
        raise DataError(
            f"{out} already holds a token store made from different input or options; add --overwrite to replace it, "
            f"or choose another --out"
        )
    return False


def _build(options: PrepareOptions, reading: Reading, fingerprint: str, folder: Path, saved: JsonObject | None) -> None:
    """Reads the sources and fills the folder of a new store, or continues from `saved`."""
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
    with TokenWriter(folder, token_dtype(size), eos[1], saved and saved["written"]) as writer:
        encoder = Encoder(tokenizer, writer, reading.update_progress, limits)
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
        report.notes += [*notes, *_notes(options, rule, encoder, reading, size)]
        meta = store_meta(tokenizer, eos, fingerprint, options, report)
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
    return rule, tokenizer, eos, notes


def _notes(options: PrepareOptions, rule: SplitRule, encoder: Encoder, reading: Reading, size: int) -> list[str]:
    """Notes for the user, in addition to the numbers."""
    requested, counts, stops = parse_training(options.tokenizer), encoder.counts, encoder.is_full("train")
    notes = {
        f"the train split has too few repeated sequences for a vocabulary of {requested} tokens; the tokenizer has {size}": (
            requested is not None and size < requested
        ),
        "the corpus is a single document, so its last part is held out, starting after a line break if possible": rule.single,
        f"count of the unknown token: {counts['unknown']}; the tokenizer cannot represent all of the text": counts[
            "unknown"
        ],
        f"characters that the tokenizer has no token for, dropped: {counts['dropped']}; choose another tokenizer": (
            counts["dropped"]
        ),
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
