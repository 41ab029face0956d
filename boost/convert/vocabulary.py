"""Tokenizers next to weights: what we export to transformers, and what we import."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from boost.convert.formats import read_json
from boost.data.tokenizer import find_eos, load_tokenizer, parse_tokenizer, tokenizer_fingerprint
from boost.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_MADE_WITH = "boost_post_processor"
"""Of tokenizer_config.json: what an exported tokenizer.json had for post_processor, which its fingerprint includes."""


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer that comes with weights."""

    json: str
    """Its file, as `boost prepare` would keep it, so that a token store of the same tokenizer is recognized."""
    fingerprint: str
    eos: int | None
    """Its end-of-document token, where that can be told."""


def read_vocabulary(path: Path, folder: Path) -> Vocabulary:
    """A tokenizer.json or its folder; `folder` may hold a tokenizer_config.json. Raises DataError."""
    tokenizer = load_tokenizer(path.resolve())
    text = tokenizer.to_str()
    said = read_json(folder / "tokenizer_config.json", "mend or remove it")
    if _MADE_WITH in said:
        try:
            tokenizer = parse_tokenizer(json.dumps({**json.loads(text), "post_processor": said[_MADE_WITH]}))
        except Exception:  # what the Rust side raises, whatever it cannot parse
            raise DataError(
                f"{_MADE_WITH} in '{folder}/tokenizer_config.json' is no post_processor; remove it, or export the folder again"
            ) from None
        text = tokenizer.to_str()
    try:
        eos: int | None = find_eos(tokenizer, folder=folder)[1]
    except DataError:
        eos = None
    return Vocabulary(text, tokenizer_fingerprint(text), eos)


def tokenizer_files(
    text: str, eos: int | None, bos: int | None, start: int | None, context: int
) -> tuple[str, dict[str, Any]]:
    """`tokenizer.json` and `tokenizer_config.json` that have transformers encode a prompt as `boost generate` does.

    `text`: the tokenizer of a checkpoint; `start`: the token that generation puts before a prompt. Nothing else is added, and
    text that spells a special token is ordinary text: what was trained so would take an end of document for the end of it.
    """
    tokenizer = parse_tokenizer(text)
    content = json.loads(text)
    before = content.get("post_processor")
    name = None if start is None else tokenizer.id_to_token(start) or f"<{start}>"
    content["post_processor"] = after = _post_processor(before, name, start)
    config = tokenizer_config(tokenizer, eos, bos, context)
    if after == before:
        return text, config
    return json.dumps(content, indent=2, ensure_ascii=False), {**config, _MADE_WITH: before}


def _post_processor(found: dict[str, Any] | None, name: str | None, start: int | None) -> dict[str, Any] | None:
    """That of a tokenizer.json, adding the token `start` before a text. ByteLevel adds nothing, it mends offsets: it stays."""
    parts = found["processors"] if found and found["type"] == "Sequence" else [found]
    kept = [part for part in parts if part and part["type"] == "ByteLevel"]
    if start is not None:
        first: list[dict[str, Any]] = [{"SpecialToken": {"id": name, "type_id": 0}}]
        a, b = ({"Sequence": {"id": sequence, "type_id": 0}} for sequence in "AB")
        known = {name: {"id": name, "ids": [start], "tokens": [name]}}
        single, pair = [*first, a], [*first, a, b]
        kept.append({"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": known})
    if len(kept) > 1:
        return {"type": "Sequence", "processors": kept}
    return kept[0] if kept else None


def tokenizer_config(tokenizer: "Tokenizer", eos: int | None, bos: int | None, context: int) -> dict[str, Any]:
    """`tokenizer_config.json` next to a tokenizer.json: all that AutoTokenizer needs.

    Padding is masked, so that any token will do: the end of a document, as is usual where there is no other.
    """
    content: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
    }
    for name, token in (("bos_token", bos), ("eos_token", eos), ("pad_token", eos)):
        text = tokenizer.id_to_token(token) if token is not None else None
        content |= {name: text} if text is not None else {}
    return content


def generation_config(eos: int | None, bos: int | None) -> dict[str, Any]:
    """`generation_config.json`: where text begins and ends."""
    known = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": eos}
    return {name: token for name, token in known.items() if token is not None}
