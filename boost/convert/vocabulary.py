"""Exports tokenizers to transformers and imports them."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from boost.convert.chat import merged_tokenizer_config, read_tokenizer_settings
from boost.convert.formats import read_json
from boost.data.tokenizer import find_eos, load_tokenizer, parse_tokenizer, tokenizer_fingerprint
from boost.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_ORIGINAL_KEY = "boost_post_processor"
"""Key in tokenizer_config.json for the original post_processor of an exported tokenizer.json, which the fingerprint includes."""


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer of imported weights."""

    json: str
    """tokenizer.json as `boost prepare` stores it, so that a token store with the same tokenizer has the same fingerprint."""
    fingerprint: str
    eos: int | None
    """Id of the end-of-document token, if known."""
    hub: dict[str, Any] = field(default_factory=dict)
    """Other settings of the folder (`boost.convert.chat`)."""


def read_vocabulary(path: Path, folder: Path) -> Vocabulary:
    """Reads a tokenizer.json or its folder; `folder` may contain a tokenizer_config.json. Raises DataError."""
    tokenizer = load_tokenizer(path.resolve())
    text = tokenizer.to_str()
    config = read_json(folder / "tokenizer_config.json", "fix or remove it")
    if _ORIGINAL_KEY in config:
        try:
            tokenizer = parse_tokenizer(json.dumps({**json.loads(text), "post_processor": config[_ORIGINAL_KEY]}))
        except Exception:  # the Rust code raises a plain Exception for anything that it cannot parse
            raise DataError(
                f"{_ORIGINAL_KEY} in '{folder}/tokenizer_config.json' is not a valid post_processor; remove it, or export again"
            ) from None
        text = tokenizer.to_str()
    try:
        eos: int | None = find_eos(tokenizer, spec=folder)[1]
    except DataError:
        eos = None
    _require_added_tokens(tokenizer, config, folder)
    return Vocabulary(text, tokenizer_fingerprint(text), eos, read_tokenizer_settings(folder))


def _require_added_tokens(tokenizer: "Tokenizer", config: dict[str, Any], folder: Path) -> None:
    """Raises DataError if tokenizer_config.json adds a token that is missing from tokenizer.json, which everything else reads."""
    added = config.get("added_tokens_decoder")
    for number, token in (added if isinstance(added, dict) else {}).items():
        text = token.get("content") if isinstance(token, dict) else None
        if isinstance(text, str) and tokenizer.token_to_id(text) is None:
            raise DataError(
                f"'{folder}/tokenizer_config.json' adds token {number} = {text!r}, which tokenizer.json does not have; save the "
                "tokenizer again: AutoTokenizer.from_pretrained(PATH).save_pretrained(PATH)"
            )


def tokenizer_files(
    text: str, eos: int | None, bos: int | None, start: int | None, context: int, hub: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    """Returns `tokenizer.json` and `tokenizer_config.json`, such that transformers encodes a prompt as `boost generate` does.

    `text`: the tokenizer of a checkpoint; `start`: the token that generation prepends to a prompt. Nothing else is added, and
    text that matches a special token is encoded as ordinary text, as in training. `hub`: settings of the imported folder.
    """
    tokenizer = parse_tokenizer(text)
    content = json.loads(text)
    original = content.get("post_processor")
    name = None if start is None else tokenizer.id_to_token(start) or f"<{start}>"
    content["post_processor"] = exported = _post_processor(original, name, start)
    ours: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
    }
    # Padding is masked, so any token works as pad; eos is the usual choice without a pad token.
    for token_name, token in (("bos_token", bos), ("eos_token", eos), ("pad_token", eos)):
        special = tokenizer.id_to_token(token) if token is not None else None
        ours |= {token_name: special} if special is not None else {}
    config = merged_tokenizer_config(ours, hub)
    config[_ORIGINAL_KEY] = original  # even if unchanged: transformers replaces an empty one when it saves
    return text if exported == original else json.dumps(content, indent=2, ensure_ascii=False), config


def _post_processor(original: dict[str, Any] | None, name: str | None, start: int | None) -> dict[str, Any] | None:
    """Returns a post_processor that prepends the token `start`. Keeps ByteLevel, which adds no tokens and only fixes offsets."""
    parts = original["processors"] if original and original["type"] == "Sequence" else [original]
    processors = [part for part in parts if part and part["type"] == "ByteLevel"]
    if start is not None:
        first: list[dict[str, Any]] = [{"SpecialToken": {"id": name, "type_id": 0}}]
        a, b = ({"Sequence": {"id": sequence, "type_id": 0}} for sequence in "AB")
        special = {name: {"id": name, "ids": [start], "tokens": [name]}}
        single, pair = [*first, a], [*first, a, b]
        processors.append({"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special})
    if len(processors) > 1:
        return {"type": "Sequence", "processors": processors}
    return processors[0] if processors else None
