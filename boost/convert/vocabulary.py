"""Tokenizers beside weights: what transformers is told of ours, and what we take of theirs."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from boost.data.tokenizer import find_eos, load_tokenizer, tokenizer_fingerprint
from boost.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer that comes with weights."""

    json: str
    """Its file, as `boost prepare` would keep it, so that a token store of the same tokenizer is recognised."""
    fingerprint: str
    eos: int | None
    """Its end-of-document token, where that can be told."""


def read_vocabulary(path: Path, folder: Path) -> Vocabulary:
    """A tokenizer.json or its folder; `folder` may hold a tokenizer_config.json. Raises DataError."""
    tokenizer = load_tokenizer(path.resolve())
    text = tokenizer.to_str()
    try:
        eos: int | None = find_eos(tokenizer, folder=folder)[1]
    except DataError:
        eos = None
    return Vocabulary(text, tokenizer_fingerprint(text), eos)


def tokenizer_config(tokenizer: "Tokenizer", eos: int | None, bos: int | None, context: int) -> dict[str, Any]:
    """`tokenizer_config.json` beside a tokenizer.json: AutoTokenizer needs no more.

    Padding is masked, so that any token will do: the end of a document, as is usual where there is no other.
    """
    content: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    for name, token in (("bos_token", bos), ("eos_token", eos), ("pad_token", eos)):
        text = tokenizer.id_to_token(token) if token is not None else None
        content |= {name: text} if text is not None else {}
    return content


def generation_config(eos: int | None, bos: int | None) -> dict[str, Any]:
    """`generation_config.json`: where text begins and ends."""
    known = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": eos}
    return {name: token for name, token in known.items() if token is not None}
