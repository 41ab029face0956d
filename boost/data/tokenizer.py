"""Trains a byte-level BPE tokenizer or loads any Hugging Face tokenizer, and finds its end-of-document token."""

import hashlib
import json
import os
import re
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from boost.errors import DataError
from boost.paths import read_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
"""Matches the token of a single byte in tokenizers with byte fallback."""
FILE = "tokenizer.json"
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
"""Files of transformers that can override a tokenizer.json."""
END_OF_TEXT = "<|endoftext|>"
PROBES = ["It's", " 1234567", "x = ['a_b']\n\n  OK!\t\t", "\u00e9te", "te\u0301", "\u65e5\u672c\u8a9e"]
PROBES.append("".join(PROBES))
"""Texts that tokenizers split in many ways: contractions, digits, punctuation, white space, an accent in two forms, CJK."""
# All 256 bytes and the end-of-document token: the smallest lossless byte-level vocabulary.
MIN_VOCAB = 257
# In order of preference: some tokenizers have more than one of them.
EOS_GUESSES = (
    END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "<|eos|>", "<|end|>", "<|im_end|>", "[EOS]", "[SEP]",
)  # fmt: skip


def parse_training(spec: str) -> int | None:
    """The vocabulary size in `train:SIZE`, or None if the spec names an existing tokenizer. Raises `DataError`."""
    if not spec.startswith("train:"):
        return None
    size = spec.removeprefix("train:")
    if not size.isdecimal() or not MIN_VOCAB <= int(size) <= 1 << 24:
        raise DataError(
            f"--tokenizer {spec}: the size must be an integer from {MIN_VOCAB} to {1 << 24}, such as train:4096"
        )
    return int(size)


def tokenizer_identity(spec: str, eos: str | None) -> dict[str, str] | str:
    """sha256 (hex) of everything that decides tokens, by name: files of a local tokenizer (tokenizer.json, its configuration and
    special tokens), or the content of a tokenizer on the Hub. `train:SIZE` itself. Raises `DataError`."""
    path = Path(spec)
    if parse_training(spec) is not None:
        return spec
    if not path.exists():
        tokenizer = load_tokenizer(spec, [])
        return {"tokenizer": tokenizer_fingerprint(tokenizer), "eos": find_eos(tokenizer, eos, spec)[0]}
    folder = path if path.is_dir() else path.parent
    files = {*([path] if path.is_file() else []), *(folder / name for name in (FILE, *SETTINGS))}
    return {
        file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(files)
        if file.is_file()
    } or spec


def train_tokenizer(texts: Iterable[str], vocab_size: int, eos: str = END_OF_TEXT) -> "Tokenizer":
    """Trains a byte-level BPE tokenizer: `eos` has id 0, all 256 bytes follow, then merges that occur at least twice.

    The same texts in the same order give the same tokenizer. It has `vocab_size` entries, or fewer if the texts yield fewer
    merges (see `vocabulary_size`). It can encode every byte sequence.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[eos],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _as_plain_encoder(tokenizer)


def load_tokenizer(spec: str | Path, notes: list[str] | None = None) -> "Tokenizer":
    """Loads a `tokenizer.json`, a folder that contains one, or a tokenizer from the Hugging Face Hub by name.

    If transformers' settings (`SETTINGS`) are next to the tokenizer.json, transformers loads both, because it decides which of them
    override it. Encoding adds no special tokens, neither truncates nor pads, and is deterministic. Text that spells a special token
    is not matched as one (see `PlainText`). `notes`: receives what differs from transformers; without it, that is a warning. Raises
    `DataError`.
    """
    from tokenizers import Tokenizer

    path = Path(spec)
    folder = path.parent if path.is_file() and path.name == FILE else path
    if folder.is_dir():
        path = folder / FILE
        if not path.is_file():
            raise DataError(
                f"{spec} contains no tokenizer.json; save the tokenizer with Hugging Face 'save_pretrained'"
            )
    found: list[str] = []
    if path.is_file():
        try:
            tokenizer = file = Tokenizer.from_file(str(path))
        except Exception as error:
            # The Rust side raises a plain Exception for anything it cannot parse.
            raise DataError(f"{path}: not a Hugging Face tokenizer.json: {_first_line(error)}") from error
        if settings := [name for name in SETTINGS if (path.parent / name).is_file() and folder == path.parent]:
            try:
                owner = by_transformers(folder)
                tokenizer = _with_settings(file, owner)
                found += _class_notes(file, owner) if tokenizer is not file else []
            except ImportError:
                found.append(f"{settings[0]} of the tokenizer not applied; that needs: pip install transformers")
        tokenizer = _as_plain_encoder(tokenizer, found)
    elif str(spec).startswith((".", "/", "~")) or str(spec).endswith(".json"):
        raise DataError(f"--tokenizer {spec}: no such file; pass a tokenizer.json, a Hub tokenizer, or train:4096")
    else:
        tokenizer = _as_plain_encoder(_from_hub(str(spec), found), found)
    for note in found:
        if notes is None:
            warnings.warn(note, stacklevel=2)
    if notes is not None:
        notes += found
    return tokenizer


def by_transformers(spec: str | Path) -> "PreTrainedTokenizerFast":
    """The transformers tokenizer of a folder or of the Hub. Never runs its code. Raises `DataError`, or `ImportError` without
    transformers."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    is_local, level = Path(spec).is_dir(), logging.get_verbosity()
    logging.set_verbosity_error()  # it warns about the model type of each of our exports
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(spec), local_files_only=is_local, trust_remote_code=False)
        if not hasattr(tokenizer, "backend_tokenizer"):
            raise ValueError(f"{type(tokenizer).__name__} has no fast version")
    except Exception as error:  # the Rust side raises a plain Exception, and damaged settings any type
        if not is_local:
            raise
        fix = "correct its settings, or pass its tokenizer.json copied to another folder"
        raise DataError(f"transformers cannot read the tokenizer in '{spec}': {_first_line(error)}; {fix}") from error
    finally:
        logging.set_verbosity(level)
    return tokenizer


def _with_settings(file: "Tokenizer", owner: "PreTrainedTokenizerFast") -> "Tokenizer":
    """The tokenizer that transformers made of a tokenizer.json and its settings. Returns `file`, the tokenizer.json alone, if they
    are equal, so that it has the same fingerprint with and without the settings."""
    ours, theirs = (json.loads(each.to_str()) for each in (file, owner.backend_tokenizer))
    # transformers replaces an empty post-processor by one that adds nothing either.
    if not any(each.num_special_tokens_to_add(False) for each in (file, owner.backend_tokenizer)):
        theirs["post_processor"] = ours["post_processor"]
    theirs |= {key: ours[key] for key in ("truncation", "padding")}
    # A token that settings declare as not special keeps what tokenizer.json says of it, but is saved as the settings say.
    for token in theirs["added_tokens"]:
        with_special, without = (owner.backend_tokenizer.decode([token["id"]], skip) for skip in (False, True))
        token["special"] = token["special"] or bool(with_special and not without)
    return file if theirs == ours else type(file).from_str(json.dumps(theirs))


def differing_text(one: "Tokenizer", other: "Tokenizer") -> str | None:
    """The first of `PROBES` that two tokenizers encode differently; None if there is none. Some classes of transformers replace the
    rules of a tokenizer.json, which the model was trained with, by their own."""

    def probed(tokenizer: "Tokenizer", text: str) -> list[int] | None:
        try:
            ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # the Rust side raises a plain Exception for text that a vocabulary lacks, or panics
            return None
        return ids

    one, other = (parse_tokenizer(tokenizer.to_str()) for tokenizer in (one, other))
    return next((text for text in PROBES if probed(one, text) != probed(other, text)), None)


def _class_notes(file: "Tokenizer", owner: "PreTrainedTokenizerFast") -> list[str]:
    if (text := differing_text(file, owner.backend_tokenizer)) is None:
        return []
    return [
        f"transformers loads this tokenizer as {type(owner).__name__}, which encodes some text differently from tokenizer.json, "
        f"such as {text!a}; to use tokenizer.json as it is, copy it to another folder without the other files"
    ]


def _from_hub(name: str, notes: list[str]) -> "Tokenizer":
    from tokenizers import Tokenizer

    from boost.data.hub import quiet_hub

    try:
        with quiet_hub():
            try:
                owner = by_transformers(name)
                tokenizer: Tokenizer = owner.backend_tokenizer
                with suppress(Exception):  # not every repository has a tokenizer.json
                    notes += _class_notes(Tokenizer.from_pretrained(name), owner)
                return tokenizer
            except ImportError:
                notes.append(f"settings of the tokenizer {name} not applied; that needs: pip install transformers")
                return Tokenizer.from_pretrained(name)
    except Exception as error:
        raise DataError(
            f"--tokenizer {name}: neither a local file nor reachable on the Hugging Face Hub "
            f"({type(error).__name__}: {_first_line(error)}); check the name and the network, or use train:4096"
        ) from error


def parse_tokenizer(text: str) -> "Tokenizer":
    """Parses the text of a `tokenizer.json` and configures the tokenizer as `load_tokenizer` does."""
    from tokenizers import Tokenizer

    return _as_plain_encoder(Tokenizer.from_str(text))


def _as_plain_encoder(tokenizer: "Tokenizer", notes: list[str] | None = None) -> "Tokenizer":
    if getattr(tokenizer.model, "byte_fallback", False):
        # A trainer takes byte tokens only as special tokens. As such, decoding would drop them, and text could spell them.
        content = json.loads(tokenizer.to_str())
        added, ids = content["added_tokens"], tokenizer.model.token_to_id
        content["added_tokens"] = [
            token for token in added if not _BYTE.fullmatch(token["content"]) or ids(token["content"]) != token["id"]
        ]
        if content["added_tokens"] != added:
            tokenizer = type(tokenizer).from_str(json.dumps(content))
    # BERT-like files set truncation to 512 tokens, which would silently drop text.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    if dropout := getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None
        if notes is not None:
            notes.append(
                f"the tokenizer's dropout of {dropout:g} is off, so that the same text always has the same tokens"
            )
    return tokenizer


class PlainText:
    """The tokens of text that cannot contain a special token, in particular an end of document, whatever the text spells.

    `encode_special_tokens` keeps special tokens from being matched in text, but a vocabulary may also contain their spelling: as a
    piece of a Unigram model, as a word of a WordLevel model, or as the result of a BPE merge.
    """

    def __init__(self, tokenizer: "Tokenizer", eos: int | None = None) -> None:
        """`eos`: the end-of-document token, which need not be a special token."""
        self._tokenizer, self._model = tokenizer, tokenizer.model
        self._prefix = getattr(tokenizer.model, "continuing_subword_prefix", None) or ""
        added = tokenizer.get_added_tokens_decoder()
        self._added = {number: token.content for number, token in added.items()}
        name = getattr(tokenizer.model, "unk_token", None)
        self.unknown: int | None = tokenizer.token_to_id(name) if name else None
        if type(tokenizer.model).__name__ == "Unigram":
            self.unknown = json.loads(tokenizer.to_str())["model"]["unk_id"]
        """Id of the token for text that the tokenizer cannot represent; None if it has no such token."""
        self._special = {eos, *(number for number, token in added.items() if token.special)}
        self._special.discard(self.unknown)
        self._split: dict[int, list[int]] = {}
        self._alphabet = _alphabet_of_dropping(tokenizer)
        self.counts = {"unknown": 0, "dropped": 0, "spelled": 0, "forged": 0}
        """Unknown tokens; characters without a token; special tokens that text spelled: split into ordinary tokens, and those that
        cannot be."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        return self.ids(self._tokenizer.encode(text, add_special_tokens=False).ids, text)

    def ids(self, ids: list[int], text: str) -> list[int]:
        """The tokens `ids` of a text, in which ordinary tokens replace each special token that the text spells."""
        self.counts["dropped"] += self.dropped(ids, text)
        if not self._special.isdisjoint(ids):
            plain: list[int] = []
            for token in ids:
                if token not in self._special:
                    plain.append(token)
                    continue
                if token not in self._split:
                    self._split[token] = self._pieces(token)
                self.counts["spelled" if self._split[token] else "forged"] += 1
                plain += self._split[token] or [token]
            ids = plain
        if self.unknown is not None:
            self.counts["unknown"] += ids.count(self.unknown)
        return ids

    def dropped(self, ids: Iterable[int], text: str) -> int:
        """How many characters of the normalized text have no token; white space that separates words does not count."""
        if (alphabet := self._alphabet) is None:
            return 0
        count, normalizer, splitter = 0, self._tokenizer.normalizer, self._tokenizer.pre_tokenizer
        # Not by offsets, which are wrong after a dropped character (tokenizers 0.23).
        for name in [*(self._added[token] for token in ids if token in self._added), None]:
            part, _, text = (text, "", "") if name is None else text.partition(name) if name in text else ("", "", text)
            normal = normalizer.normalize_str(part) if normalizer else part
            words = splitter.pre_tokenize_str(normal) if splitter else [(normal, (0, 0))]
            count += sum(character not in alphabet for word, _ in words for character in word)
        return count

    def _pieces(self, token: int) -> list[int]:
        """Ordinary tokens with the same text; the unknown token if there are none; nothing if there is no unknown token either."""
        word = self._tokenizer.id_to_token(token) or ""
        for at in range(1, len(word)):
            try:
                pieces = [*self._model.tokenize(word[:at]), *self._model.tokenize(word[at:])]
            except Exception:  # the Rust side raises a plain Exception if the vocabulary lacks a part
                continue
            ids = [piece.id for piece in pieces]
            is_whole = "".join(piece.value.removeprefix(self._prefix) for piece in pieces) == word
            if is_whole and self.unknown not in ids and self._special.isdisjoint(ids):
                return ids
        return [] if self.unknown is None else [self.unknown]


def _alphabet_of_dropping(tokenizer: "Tokenizer") -> set[str] | None:
    """The vocabulary of a tokenizer that drops other characters without a trace: BPE without unknown token and byte fallback. None
    if it drops none."""
    from tokenizers.pre_tokenizers import ByteLevel

    model = tokenizer.model
    if type(model).__name__ != "BPE" or model.unk_token is not None or model.byte_fallback:
        return None
    steps = [step.__getstate__() for step in (tokenizer.normalizer, tokenizer.pre_tokenizer) if step]
    if any(b'"ByteLevel"' in step for step in steps) and None not in map(model.token_to_id, ByteLevel.alphabet()):
        return None
    return {*tokenizer.get_vocab(with_added_tokens=False)}


class TextStream:
    """Decodes tokens that continue a prompt, piece by piece.

    The text of a token depends on the tokens before it: many tokenizers drop the leading space of a text's first token, and the
    bytes of one character may span several tokens. Together, the pieces are the text that the new tokens add to the decoded prompt.
    """

    def __init__(self, tokenizer: "Tokenizer", prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._before, self._new = list(prompt), list[int]()

    def add(self, *tokens: int) -> str:
        """Adds tokens. Returns the text that they complete, which later tokens cannot change."""
        self._new += tokens
        # With byte fallback, an invalid byte changes all bytes around it, even across special tokens.
        last = tokens[-1:]
        if not self._tokenizer.decode(last) or _BYTE.fullmatch(self._tokenizer.id_to_token(*last) or ""):
            return ""
        text = self.rest()
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        if self._tokenizer.decode(self._new):  # enough context for the next token
            self._before, self._new = self._new, []
        else:
            self._before, self._new = self._before + self._new, []
        return text

    def rest(self) -> str:
        """The text that has not been returned yet, as if no more tokens followed."""
        before, whole = (self._tokenizer.decode(tokens) for tokens in (self._before, self._before + self._new))
        return str(whole[len(os.path.commonprefix([before, whole])) :])  # noqa: RUF071 (characters are meant)


def continuation(tokenizer: "Tokenizer", prompt: Sequence[int], new: Sequence[int]) -> str:
    """The text that `new` tokens add to a prompt."""
    stream = TextStream(tokenizer, prompt)
    return stream.add(*new) + stream.rest()


def vocabulary_size(tokenizer: "Tokenizer") -> int:
    """One more than the largest token id: the smallest `vocab_size` for a model. Some vocabularies have gaps."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def find_eos(tokenizer: "Tokenizer", eos: str | None = None, spec: str | Path | None = None) -> tuple[str, int]:
    """The end-of-document token and its id: `eos` if given, else the token configured next to the tokenizer.json of `spec` (see
    `load_tokenizer`), else the first of `EOS_GUESSES` that the tokenizer has. Raises `DataError`."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if eos is not None:
        if eos not in vocabulary:
            raise DataError(f"--eos {eos}: not a token of this tokenizer; pass one of its {len(vocabulary)} tokens")
        return eos, vocabulary[eos]
    for guess in (_configured_eos(spec), *EOS_GUESSES):
        if guess in vocabulary:
            return guess, vocabulary[guess]
    raise DataError("the tokenizer has no known end-of-document token; pass one of its tokens with --eos TOKEN")


def _configured_eos(spec: str | Path | None) -> str:
    """The eos_token that transformers finds for a tokenizer with settings, locally or on the Hub; "" if there is none. Without
    transformers: the one in tokenizer_config.json."""
    path = Path(spec or os.devnull)
    folder = path if path.is_dir() else path.parent
    is_local = path.exists()
    try:
        if is_local and not any((folder / name).is_file() for name in SETTINGS):
            return ""
        if not is_local or (folder / FILE).is_file():
            with suppress(ImportError):
                return str(by_transformers(folder if is_local else str(spec)).eos_token or "")
        file = folder / SETTINGS[0]
        if not is_local:
            from huggingface_hub import hf_hub_download

            from boost.data.hub import quiet_hub

            with quiet_hub():
                file = Path(hf_hub_download(str(spec), file.name))
        token = json.loads(read_text(file)).get("eos_token")
    except (OSError, ValueError, AttributeError, RecursionError):
        return ""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def tokenizer_fingerprint(tokenizer: "Tokenizer | str") -> str:
    """sha256 (hex) of a tokenizer's JSON with sorted keys and no spaces, from the tokenizer or the text of its file."""
    text = tokenizer if isinstance(tokenizer, str) else tokenizer.to_str()
    canonical = json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
