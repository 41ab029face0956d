"""Tokenizers, chat templates and generation settings of Hugging Face folders. Import keeps them; export restores them."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter, ValidationError

from boost.convert.formats import read_json
from boost.data.tokenizer import find_eos, load_tokenizer, parse_tokenizer, tokenizer_fingerprint
from boost.errors import ConfigError, DataError
from boost.paths import file_name, read_text
from boost.text import JsonObject, brief
from boost.train.checkpoint import HUB, Checkpoint
from boost.train.checkpoint.commit import STATE_FILE
from boost.train.checkpoint.verify import EndTokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TEMPLATE_FILE, TEMPLATE_FOLDER = "chat_template.jinja", "additional_chat_templates"
_SPECIAL = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_TOKENIZER_KEYS = (
    *(f"{name}_token" for name in _SPECIAL),
    "additional_special_tokens",
    "extra_special_tokens",
    "model_specific_special_tokens",
    "model_input_names",
    "response_template",
    "padding_side",
    "truncation_side",
    "split_special_tokens",
)
"""Fields of tokenizer_config.json to keep. The other fields name files or classes, or repeat what tokenizer.json contains."""
_GENERATION_KEYS = {
    "bos_token_id", "cache_implementation", "do_sample", "eos_token_id", "max_length", "max_new_tokens", "pad_token_id",
    "temperature", "top_k", "top_p", "use_cache",
}  # fmt: skip
"""Fields of generation_config.json that `boost generate` uses, has as options, or need not know."""
BOS = "bos_token_id"
"""Settings key for a folder's bos token, which starts a prompt only if the tokenizer also prepends it."""
_ORIGINAL_KEY = "boost_post_processor"
"""Key in tokenizer_config.json for an exported tokenizer's original post_processor, which its fingerprint includes."""


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer for imported weights."""

    json: str
    """tokenizer.json as `boost prepare` stores it, so that a token store with the same tokenizer has the same fingerprint."""
    fingerprint: str
    eos: int | None
    """Id of the end-of-document token, if known."""
    start: int | None
    """Id of the token that the tokenizer prepends to every text, regardless of the bos_token that its folder names."""
    hub: JsonObject = field(default_factory=dict)
    """Other settings, if the folder has them: `tokenizer` (special tokens), `chat_templates`."""
    notes: list[str] = field(default_factory=list)
    """How transformers reads the tokenizer differently from its tokenizer.json."""


def read_vocabulary(path: Path) -> Vocabulary:
    """Reads a tokenizer.json or its folder, which may contain a tokenizer_config.json. Raises ConfigError, DataError."""
    folder = path if path.is_dir() else path.parent
    config = read_json(folder / "tokenizer_config.json", "fix or remove it")
    templates = _templates(folder, config)
    notes: list[str] = []
    tokenizer = load_tokenizer(path.resolve(), notes)
    text = tokenizer.to_str()
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    with_special = tokenizer.encode("a").ids
    before = next((i for i in range(len(with_special)) if with_special[i : i + len(plain)] == plain), 0)
    if before > 1:
        raise DataError(
            f"the tokenizer in '{folder}' adds {before} tokens before every text; boost supports at most one"
        )
    if len(with_special) > before + len(plain) and plain:
        notes.append(
            "the tokenizer adds a token after every text, which boost and its exports leave out, so that prompts continue"
        )
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
    added = config.get("added_tokens_decoder")
    for number, token in (added if isinstance(added, dict) else {}).items():
        content = token.get("content") if isinstance(token, dict) else None
        if isinstance(content, str) and tokenizer.token_to_id(content) != int(number):
            raise DataError(
                f"'{folder}/tokenizer_config.json' adds token {number} = {content!r}, not in tokenizer.json; save the "
                "tokenizer again: AutoTokenizer.from_pretrained(PATH).save_pretrained(PATH)"
            )
    start = with_special[0] if before else None
    legacy = read_json(folder / "special_tokens_map.json", "fix or remove it")
    special = {key: value for key, value in (legacy | config).items() if key in _TOKENIZER_KEYS}
    settings = {"tokenizer": special, "chat_templates": templates}
    hub = {key: value for key, value in settings.items() if value}
    return Vocabulary(text, tokenizer_fingerprint(text), eos, start, hub, notes)


def tokenizer_files(
    text: str, eos: int | None, bos: int | None, start: int | None, context: int, hub: JsonObject
) -> tuple[str, JsonObject]:
    """Returns the contents of `tokenizer.json` and `tokenizer_config.json`, with which transformers encodes a prompt as
    `boost generate` does. `merged_tokenizer_config` says how text that matches a special token is encoded.

    `text`: a checkpoint's tokenizer.json; `start`: the only token that generation adds to a prompt; `hub`: the folder's settings.
    """
    tokenizer = parse_tokenizer(text)
    content = json.loads(text)
    original = content.get("post_processor")
    name = None if start is None else _name(tokenizer, start) or f"<{start}>"
    content["post_processor"] = exported = _post_processor(original, name, start)
    ours: JsonObject = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
    }
    # Padding is masked, so any token can serve as pad; eos is the usual choice for a tokenizer without a pad token.
    for token_name, token in (("bos_token", bos), ("eos_token", eos), ("pad_token", eos)):
        special = _name(tokenizer, token) if token is not None else None
        ours |= {token_name: special} if special is not None else {}
    config = merged_tokenizer_config(ours, hub)
    for token_name in [key for key in config if key.endswith("_token")]:
        named = config[token_name].get("content") if isinstance(config[token_name], dict) else config[token_name]
        # transformers would add it, with an id outside the embedding.
        if not isinstance(named, str) or named not in tokenizer.get_vocab():
            config.pop(token_name)
            config |= {key: value for key, value in ours.items() if key == token_name}
    config[_ORIGINAL_KEY] = original  # even if unchanged: transformers replaces an empty post_processor on saving
    return text if exported == original else json.dumps(content, indent=2, ensure_ascii=False), config


def _name(tokenizer: "Tokenizer", token: int) -> str | None:
    """The text of a token. For an added token, `id_to_token` may return its normalized text instead."""
    added = tokenizer.get_added_tokens_decoder().get(token)
    name: str | None = added.content if added else tokenizer.id_to_token(token)
    return name


def _post_processor(original: JsonObject | None, name: str | None, start: int | None) -> JsonObject | None:
    """Returns a post_processor that prepends the token `start`. Keeps ByteLevel, which adds no tokens and only fixes offsets."""
    parts = original["processors"] if original and original["type"] == "Sequence" else [original]
    processors = [part for part in parts if part and part["type"] == "ByteLevel"]
    if start is not None:
        first: list[JsonObject] = [{"SpecialToken": {"id": name, "type_id": 0}}]
        a, b = ({"Sequence": {"id": sequence, "type_id": 0}} for sequence in "AB")
        special = {name: {"id": name, "ids": [start], "tokens": [name]}}
        single, pair = [*first, a], [*first, a, b]
        processors.append({"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special})
    if len(processors) > 1:
        return {"type": "Sequence", "processors": processors}
    return processors[0] if processors else None


# Chat templates and generation settings.


def read_generation_settings(folder: Path) -> JsonObject:
    """Returns {"generation": ...}, or {} if the folder has no such settings. Raises ConfigError if the file is damaged."""
    generation = read_json(folder / "generation_config.json", "fix or remove it")
    generation = {key: value for key, value in generation.items() if key != "transformers_version"}
    eos = read_json(folder / "config.json", "fix it").get("eos_token_id")
    if isinstance(eos, list) and eos:  # a checkpoint stores one eos; chat models list end-of-turn tokens too
        generation = {"eos_token_id": eos, **generation}
    try:
        TypeAdapter(EndTokens).validate_python(generation.get("eos_token_id"), strict=True)
    except ValidationError:
        ends = brief(generation["eos_token_id"])
        raise ConfigError(
            f"eos_token_id = {ends} of '{folder}' is neither a token id nor a list of them; fix it"
        ) from None
    return {"generation": generation} if generation else {}


def is_unused(name: str, value: object) -> bool:
    """Whether a generation setting changes what transformers generates, but is no option of `boost generate`."""
    return not (name.startswith("_") or name in _GENERATION_KEYS or value in (None, False, 1, [], {}))


def _templates(folder: Path, config: JsonObject) -> dict[str, str]:
    """Returns chat templates by name. They are in tokenizer_config.json (one, or a list) or in separate files, which transformers 5
    writes and which take precedence."""
    value = config.get("chat_template")
    try:
        if isinstance(value, list):
            templates = {entry["name"]: entry["template"] for entry in value}
        else:
            templates = {} if value is None else dict(value) if isinstance(value, dict) else {"default": value}
        if not all(isinstance(text, str) for pair in templates.items() for text in pair):
            raise TypeError
    except (KeyError, TypeError, ValueError):
        raise DataError(
            f"chat_template in '{folder}/tokenizer_config.json' is not a valid template; fix or remove it"
        ) from None
    for name in templates:
        file_name(name, folder / "tokenizer_config.json", "name of a chat_template")
    files = {file.stem: file for file in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))}
    if (folder / TEMPLATE_FILE).is_file():
        files["default"] = folder / TEMPLATE_FILE
    for name, file in files.items():
        try:
            templates[name] = read_text(file)
        except (OSError, ValueError) as error:
            raise DataError(f"'{file}' cannot be read ({error}); fix or remove it") from None
    return templates


def template_files(checkpoint: Checkpoint) -> dict[str, str]:
    """Returns the chat templates, keyed by the file names that transformers 5 uses. Raises DataError for an unsafe name."""
    files, templates = {}, (checkpoint.data.get(HUB) or {}).get("chat_templates", {})
    for name, text in templates.items():
        name = file_name(name, checkpoint.path / STATE_FILE, f"{HUB}.chat_templates")
        files[TEMPLATE_FILE if name == "default" else f"{TEMPLATE_FOLDER}/{name}.jinja"] = text
    return files


def merged_tokenizer_config(ours: JsonObject, hub: JsonObject) -> JsonObject:
    """Returns our `tokenizer_config.json` with the folder's special tokens, padding side and truncation side.

    Text that matches a special token is encoded as ordinary text, as in training. Models with a chat template are the exception,
    because templates write special tokens as text.
    """
    # Filtered again, because an auto_map in an untrusted state.json would run foreign code.
    kept = {key: value for key, value in hub.get("tokenizer", {}).items() if key in _TOKENIZER_KEYS}
    # transformers 5 saves this name; 4 fails on it, and both read the older.
    if isinstance(kept.get("extra_special_tokens"), list):
        kept["additional_special_tokens"] = kept.pop("extra_special_tokens")
    split = kept.pop("split_special_tokens", False)
    merged = {**ours, **kept}
    if hub.get("chat_templates"):
        merged["split_special_tokens"] = split
    return merged


def merged_generation_config(ours: JsonObject, hub: JsonObject) -> JsonObject:
    """Returns the folder's `generation_config.json`, with our values as defaults. The run's own eos always ends generation."""
    merged = {**ours, **hub.get("generation", {})}
    eos, ends = ours.get("eos_token_id"), merged.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if eos is not None and eos not in ends:
        merged["eos_token_id"] = [eos, *ends] if ends else eos
    return merged


def end_tokens(data: JsonObject) -> list[int]:
    """Ids of the tokens that end a text: the eos tokens of a checkpoint's `data` and of the folder it was imported from."""
    ours = {} if data.get("eos") is None else {"eos_token_id": data["eos"]}
    ends = merged_generation_config(ours, data.get(HUB) or {}).get("eos_token_id")
    return ends if isinstance(ends, list) else [] if ends is None else [ends]
