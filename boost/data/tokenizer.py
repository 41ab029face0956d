"""Trains a byte-level BPE tokenizer or loads any Hugging Face tokenizer, and finds its end-of-document token."""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from boost.errors import DataError
from boost.paths import read_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
"""Matches the token of a single byte in tokenizers with byte fallback."""
END_OF_TEXT = "<|endoftext|>"
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


def load_tokenizer(spec: str | Path) -> "Tokenizer":
    """Loads a `tokenizer.json`, a folder that contains one, or a tokenizer from the Hugging Face Hub by name.

    Encoding adds no special tokens, and neither truncates nor pads. Text that spells a special token is encoded as
    ordinary text, so a document cannot forge a document boundary. Raises `DataError`.
    """
    from tokenizers import Tokenizer

    path = Path(spec)
    if path.is_dir():
        path = path / "tokenizer.json"
        if not path.is_file():
            raise DataError(
                f"{spec} contains no tokenizer.json; save the tokenizer with Hugging Face 'save_pretrained'"
            )
    if path.is_file():
        try:
            return _as_plain_encoder(Tokenizer.from_file(str(path)))
        except Exception as error:
            # The Rust side raises a plain Exception for anything it cannot parse.
            raise DataError(f"{path}: not a Hugging Face tokenizer.json: {_first_line(error)}") from error
    if str(spec).startswith((".", "/", "~")) or str(spec).endswith(".json"):
        raise DataError(f"--tokenizer {spec}: no such file; pass a tokenizer.json, a Hub tokenizer, or train:4096")
    from boost.data.hub import quiet_hub

    try:
        with quiet_hub():
            return _as_plain_encoder(Tokenizer.from_pretrained(str(spec)))
    except Exception as error:
        raise DataError(
            f"--tokenizer {spec}: neither a local file nor reachable on the Hugging Face Hub "
            f"({type(error).__name__}: {_first_line(error)}); check the name and the network, or use train:4096"
        ) from error


def parse_tokenizer(text: str) -> "Tokenizer":
    """Parses the text of a `tokenizer.json` and configures the tokenizer as `load_tokenizer` does."""
    from tokenizers import Tokenizer

    return _as_plain_encoder(Tokenizer.from_str(text))


def _as_plain_encoder(tokenizer: "Tokenizer") -> "Tokenizer":
    # BERT-like files set truncation to 512 tokens, which would silently drop text.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


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
    """The eos_token in the `tokenizer_config.json` next to the tokenizer, locally or on the Hub; "" if there is none."""
    path = Path(spec or os.devnull)
    file = (path if path.is_dir() else path.parent) / "tokenizer_config.json"
    try:
        if not path.exists():
            from huggingface_hub import hf_hub_download

            from boost.data.hub import quiet_hub

            with quiet_hub():
                file = Path(hf_hub_download(str(spec), file.name))
        token: Any = json.loads(read_text(file)).get("eos_token")
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
