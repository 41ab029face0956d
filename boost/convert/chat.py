"""Tokenizer and generation settings of a Hugging Face folder besides tokenizer.json. Import keeps them; export restores them."""

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from boost.convert.formats import read_json
from boost.data.chat import Message, load_chat_template
from boost.errors import DataError
from boost.paths import file_name
from boost.train.checkpoint import Checkpoint
from boost.train.checkpoint.folders import STATE_FILE
from boost.train.checkpoint.state import HUB

TEMPLATE_FILE, TEMPLATE_FOLDER = "chat_template.jinja", "additional_chat_templates"
_SPECIAL = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_TOKENIZER_KEYS = (
    *(f"{name}_token" for name in _SPECIAL),
    "additional_special_tokens",
    "extra_special_tokens",
    "padding_side",
    "truncation_side",
    "split_special_tokens",
)
"""Fields of tokenizer_config.json to keep. The others name files or classes, or repeat what tokenizer.json contains."""


def read_tokenizer_settings(folder: Path) -> dict[str, Any]:
    """Returns {"tokenizer": ..., "chat_templates": ...}, each only if the folder has it. Raises ConfigError or DataError."""
    config = read_json(folder / "tokenizer_config.json", "fix or remove it")
    legacy = read_json(folder / "special_tokens_map.json", "fix or remove it")
    tokenizer = {key: value for key, value in (legacy | config).items() if key in _TOKENIZER_KEYS}
    settings = {"tokenizer": tokenizer, "chat_templates": _templates(folder, config)}
    return {key: value for key, value in settings.items() if value}


def read_generation_settings(folder: Path) -> dict[str, Any]:
    """Returns {"generation": ...}; empty if the folder has none. Raises ConfigError if the file is damaged."""
    generation = read_json(folder / "generation_config.json", "fix or remove it")
    generation = {key: value for key, value in generation.items() if key != "transformers_version"}
    eos = read_json(folder / "config.json", "fix it").get("eos_token_id")
    if isinstance(eos, list) and eos:  # a checkpoint stores one eos; chat models list end-of-turn tokens too
        generation = {"eos_token_id": eos, **generation}
    return {"generation": generation} if generation else {}


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
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
            f"chat_template in '{folder}/tokenizer_config.json' is not a template; fix or remove it"
        ) from None
    for name in templates:
        file_name(name, folder / "tokenizer_config.json", "name of a chat_template")
    files = {file.stem: file for file in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))}
    if (folder / TEMPLATE_FILE).is_file():
        files["default"] = folder / TEMPLATE_FILE
    for name, file in files.items():
        try:
            templates[name] = file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise DataError(f"'{file}' cannot be read ({error}); fix or remove it") from None
    return templates


def template_files(checkpoint: Checkpoint) -> dict[str, str]:
    """Returns file name -> content of the chat templates, as transformers 5 saves them. Raises DataError for an unsafe name."""
    files, templates = {}, (checkpoint.data.get(HUB) or {}).get("chat_templates", {})
    for name, text in templates.items():
        name = file_name(name, checkpoint.path / STATE_FILE, f"{HUB}.chat_templates")
        files[TEMPLATE_FILE if name == "default" else f"{TEMPLATE_FOLDER}/{name}.jinja"] = text
    return files


def merged_tokenizer_config(ours: dict[str, Any], hub: dict[str, Any]) -> dict[str, Any]:
    """Returns our `tokenizer_config.json` with the folder's special tokens and padding and truncation sides.

    Text that matches a special token is encoded as ordinary text, as in training. Models with a chat template are the exception,
    because templates write special tokens as text.
    """
    # Filtered again: auto_map in the state.json of a stranger would run their code.
    kept = {key: value for key, value in hub.get("tokenizer", {}).items() if key in _TOKENIZER_KEYS}
    split = kept.pop("split_special_tokens", False)
    merged = {**ours, **kept}
    if hub.get("chat_templates"):
        merged["split_special_tokens"] = split
    return merged


def load_template_of(checkpoint: Checkpoint) -> Callable[[list[Message]], str] | None:
    """Returns `load_chat_template` of a checkpoint: of its own files, or of the folder that it was imported from."""
    hub = checkpoint.data.get(HUB) or {}
    if (checkpoint.path / TEMPLATE_FILE).is_file() or not hub.get("chat_templates"):
        return load_chat_template(checkpoint.path)
    with tempfile.TemporaryDirectory(prefix="boost-chat-") as temporary:
        folder = Path(temporary)
        shutil.copy(checkpoint.tokenizer, folder / "tokenizer.json")
        (folder / "tokenizer_config.json").write_text(json.dumps(merged_tokenizer_config({}, hub)), encoding="utf-8")
        for name, text in template_files(checkpoint).items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
        return load_chat_template(folder)


def merged_generation_config(ours: dict[str, Any], hub: dict[str, Any]) -> dict[str, Any]:
    """Returns the folder's `generation_config.json`, with ours as defaults. The run's own eos always ends generation."""
    merged = {**ours, **hub.get("generation", {})}
    eos, ends = ours.get("eos_token_id"), merged.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if eos is not None and eos not in ends:
        merged["eos_token_id"] = [eos, *ends] if ends else eos
    return merged


def end_tokens(data: Mapping[str, Any]) -> list[int]:
    """Ids of the tokens that end a text: the eos of a checkpoint's `data`, and those of the folder that it was imported from."""
    ours = {} if data.get("eos") is None else {"eos_token_id": data["eos"]}
    ends = merged_generation_config(ours, data.get(HUB) or {}).get("eos_token_id")
    return ends if isinstance(ends, list) else [] if ends is None else [ends]
