"""Loads a validated `Config` from a preset or a TOML file plus dotted overrides, and writes it back to TOML."""

import contextlib
import difflib
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, get_args, get_origin

import tomli_w
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from boost.config import rules
from boost.config.schema import Config, ModelConfig
from boost.config.section import Tagged
from boost.errors import ConfigError
from boost.text import JsonObject, brief, brief_text, parse_toml, read_toml

_PRESETS = resources.files("boost.config") / "presets"
RANKS = "model.ranks"
"""A table of integers whose entries are keys too: --model.ranks.attn."""
MIXTURE = "data.mixture"
"""A table of numbers. Its keys are paths, so it is always given as a whole."""


def presets() -> list[str]:
    """Names that are accepted in place of a configuration file, sorted."""
    return sorted(item.name.removesuffix(".toml") for item in _PRESETS.iterdir() if item.name.endswith(".toml"))


def summary(preset: str) -> str:
    """A short description of a preset: the first comment of its file, up to the first colon, semicolon or period."""
    first = (_PRESETS / f"{preset}.toml").read_text(encoding="utf-8").partition("\n")[0]
    words = re.split(r"[:;.] |[:;.]$", first.removeprefix("# "))[0]
    return words + ")" * (words.count("(") - words.count(")"))


def load(source: str | None, overrides: Sequence[str] = (), model: ModelConfig | None = None) -> Config:
    """Loads and validates the configuration in `source` (preset name, TOML path, or None for the defaults) with `overrides`.

    `model` is used if `source` has no [model] section. `overrides` are command-line arguments: `--section.key value` or
    `--section.key=value`.
    Raises ConfigError: one line with the field, its value and the nearest valid value.
    """
    tree = {} if source is None else read_source(source)
    if model is not None and "model" not in tree:
        tree["model"] = model.model_dump()
    change(tree, dict(parse_overrides(overrides)))
    return from_tree(tree)


def for_weights(config: Config, source: Config) -> Config:
    """Adapts `config` to a run that starts from a checkpoint with configuration `source`, because defaults suit only new weights.

    Unless set, the sequence length is the checkpoint's, and the peak learning rate is a tenth of the default, or a thirtieth if
    latents have an activation (docs/negative-results.md). Raises ConfigError.
    """
    tree = config.model_dump(exclude_none=True)
    if "lr" not in config.optim.model_fields_set:
        tree["optim"]["lr"] = 3e-4 if config.model.latent_act == "none" else 1e-4
    if "seq_len" not in config.train.model_fields_set:
        tree["train"]["seq_len"] = source.train.seq_len
    return from_tree(tree)


def change(tree: JsonObject, changes: Mapping[str, object]) -> None:
    """Sets values by dotted key in a document. If a change selects another class (optim.name, model.family, ...), first removes the
    fields that only the previous class has."""
    for section, root in _tagged():
        of_section = {key.partition(".")[2]: value for key, value in changes.items() if key.startswith(f"{section}.")}
        if isinstance(table := tree.get(section, {}), dict):
            root.switch(table, of_section)
    for key, other in ((MIXTURE, "store"), ("data.store", MIXTURE.partition(".")[2])):
        if key in changes and isinstance(table := tree.get("data"), dict):
            table.pop(other, None)  # only one of the two may be set
    for key, value in changes.items():
        *sections, name = key.split(".", 2) if key.startswith(f"{RANKS}.") else key.split(".", 1)
        table = tree
        for section in sections:
            table = table.setdefault(section, {}) if isinstance(table, dict) else {}
        if isinstance(table, dict):
            table[name] = value


def dense_of(config: Config) -> Config:
    """The configuration with dense linears of the same sizes; without what only other families have. Not checked by the rules."""
    tree = config.model_dump(exclude_none=True)
    change(tree, {"model.family": "dense"})
    return validated(tree)


def tags() -> list[tuple[str, str]]:
    """(section, key) for every tag, each before the tags that it may change."""
    return [(section, tagged.tag()) for section, root in _tagged() for tagged in (root, *root.parts.values())]


def _tagged() -> Iterator[tuple[str, type[Tagged]]]:
    for section, info in Config.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Tagged):
            yield section, info.annotation


def from_tree(tree: JsonObject) -> Config:
    """Validates a parsed TOML or JSON document, including the rules between fields. Raises ConfigError."""
    config = validated(tree)
    rules.check(config)
    return config


def as_config(source: Config | Mapping[str, object] | str | Path) -> Config:
    """Returns a validated configuration from an object, a nested dict, a TOML file or a preset. Raises ConfigError."""
    if isinstance(source, Config):
        return source
    return from_tree(dict(source)) if isinstance(source, Mapping) else load(str(source))


def validated(tree: JsonObject) -> Config:
    """Validates each field of a document, but not the rules between fields. Raises ConfigError."""
    for section, table in tree.items():
        for key, value in table.items() if isinstance(table, dict) else ():
            texts = value if isinstance(value, list | tuple | dict) else (value,)
            if any(isinstance(text, str) and re.search("[\ud800-\udfff]", text) for text in texts):
                raise ConfigError(
                    f"{section}.{key} = {brief(value)} contains bytes that are not valid UTF-8; encode it as UTF-8"
                )

    def as_float(value: object) -> object:
        return float(value) if type(value) is int and abs(value) < 10**300 else value

    # TOML users write `lr = 1`, which strict validation would reject.
    converted = dict(tree)
    for key in (key for key, info in fields() if type_name(info) in ("number", _NUMBERS)):
        section, name = key.split(".", 1)
        table = converted.get(section)
        if isinstance(table, dict) and name in table:
            value = table[name]
            entries = {entry: as_float(number) for entry, number in value.items()} if isinstance(value, dict) else None
            converted[section] = {**table, name: as_float(value) if entries is None else entries}
    try:
        return Config.model_validate(converted)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from None


def to_toml(config: Config) -> str:
    """The fully resolved configuration as TOML."""
    return tomli_w.dumps(config.model_dump(exclude_none=True))


def read_source(source: str) -> JsonObject:
    """Reads the document of a preset or a file without validating it. Raises ConfigError."""
    if source in presets():
        return tomllib.loads((_PRESETS / f"{source}.toml").read_text(encoding="utf-8"))
    with contextlib.suppress(OSError, ValueError):  # the name is too long or contains NUL
        if Path(source).is_file():
            return read_toml(Path(source))
    names = difflib.get_close_matches(source, presets(), n=1)
    advice = (
        f"did you mean '{names[0]}'?"
        if names
        else "'boost config' lists the presets, and 'boost config PRESET' prints one as a starting point"
    )
    raise ConfigError(f"no configuration file and no preset named '{brief_text(source)}'; {advice}")


def fields() -> Iterator[tuple[str, FieldInfo]]:
    """Every dotted key with its type, default and documentation."""
    for section, section_info in Config.model_fields.items():
        annotation = section_info.annotation
        assert isinstance(annotation, type) and issubclass(annotation, BaseModel)
        of_section = annotation.keys() if issubclass(annotation, Tagged) else annotation.model_fields.items()
        for name, info in of_section:
            yield f"{section}.{name}", info


def type_name(info: FieldInfo) -> str:
    """A field's type in words, such as 'integer', 'true or false' or 'list of integers', or its choices."""
    annotation = info.annotation
    if get_origin(annotation) is tuple:
        return _TEXTS if get_args(annotation)[0] is str else _INTEGERS
    if get_origin(annotation) is dict:
        value = get_args(annotation)[1]
        return _NUMBERS if get_args(value)[0] is float else _TABLE
    for choice in (annotation, *get_args(annotation)):
        plain = get_args(choice)[0] if get_origin(choice) is Annotated else choice
        if plain in _TYPE_NAMES:
            return _TYPE_NAMES[plain]
    return " | ".join(str(choice) for choice in get_args(annotation))


_INTEGERS = "list of integers"
_TEXTS = "list of texts"
_TABLE = "table of integers"
_NUMBERS = "table of numbers"
_MIXTURE_EXAMPLE = '{ "data/c4" = 0.7, "data/code" = 0.3 }'
_TYPE_NAMES: dict[object, str] = {bool: "true or false", int: "integer", float: "number", str: "text"}
_PARSED = (_INTEGERS, _TEXTS, _TABLE, _NUMBERS, "true or false", "integer", "number")
"""Types whose command-line values are TOML. Values of other types are plain text, or one of several choices."""


def parse_overrides(words: Sequence[str]) -> Iterator[tuple[str, object]]:
    """Parses `--a.b value` and `--a.b=value` into (dotted key, value), with values of the field's type."""
    known = dict(fields())
    rest = list(words)
    while rest:
        word = rest.pop(0)
        key, equals, value = word.removeprefix("--").partition("=")
        field = RANKS if key.startswith(f"{RANKS}.") else key
        if not word.startswith("--") or (field not in known and "." not in field):
            kind = "option" if word.startswith("--") else "argument"
            raise ConfigError(f"unknown {kind} '{word}'; {_suggest(key, known, 'key', prefix='--')}")
        if field not in known:
            raise ConfigError(f"unknown key '{key}'; {_suggest(key, known, 'key')}")
        expected = "integer" if field != key else type_name(known[field])
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"--{key} has no value; write --{key} VALUE ({expected})")
            value = rest.pop(0)
        parsed: object = value
        if expected in _PARSED:
            with contextlib.suppress(ValueError):  # validation reports what is wrong
                parsed = parse_toml(f"value = {value}")["value"]
        yield key, parsed


def _explain(error: ValidationError) -> str:
    """pydantic's first error as one line: the field, its value and the nearest valid value."""
    detail = error.errors()[0]
    known, value, context = dict(fields()), detail["input"], detail.get("ctx", {})
    shown = brief(value)
    key = ".".join(str(part) for part in detail["loc"])
    if key not in known and (flat := f"{detail['loc'][0]}.{detail['loc'][-1]}") in known:
        key = flat  # a part of a section: its keys are flat in the section
    if detail["type"] == "extra_forbidden":
        if "." in key:
            return f"unknown key '{key}'; {_suggest(key, known, 'key')}"
        return f"unknown section '{key}'; {_suggest(key, Config.model_fields, 'section')}"
    if key in Config.model_fields:
        return f"{key} = {shown}: {key} is a section; write its keys under [{key}]"
    match detail["type"]:
        case "misplaced":
            return detail["msg"]
        case "literal_error":
            # Those of this class of the section: another class may have a field of this name.
            choices = [choice.strip("'") for choice in re.split(", | or ", context["expected"])]
            near = _suggest(str(value), choices, "value")
            return f"{key} = {shown} is not one of {', '.join(choices)}" + f"; {near}" * near.startswith("did you mean")
        case "greater_than_equal":
            return f"{key} = {shown} is too small; smallest valid value: {context['ge']}"
        case "greater_than":
            return f"{key} = {shown} is too small; it must be greater than {context['gt']}"
        case "less_than":
            return f"{key} = {shown} is too large; it must be less than {context['lt']}"
        case "string_too_short":
            return f"{key} is empty; set it to a path"
        case "string_pattern_mismatch":
            return f"{key} = {shown} contains a NUL character, which is not allowed in a path; use another path"
        case "less_than_equal":
            return f"{key} = {shown} is too large; largest valid value: {context['le']}"
    if key.startswith(f"{MIXTURE}."):
        return f"{key} = {shown} must be a finite number, as in {MIXTURE} = {_MIXTURE_EXAMPLE}"
    if key.startswith(f"{RANKS}."):
        return f"{key} = {shown} must be an integer, such as 128"
    subject = f"{key} = {shown}"
    if key not in known:  # an item of a list
        key = key.rpartition(".")[0]
        subject = f"{key} contains an item {shown}, but"
    kind = type_name(known[key])
    examples: dict[str, object] = {
        _INTEGERS: [9, 7],
        _TEXTS: ["Once upon a time"],
        _TABLE: "{ attn = 128, mlp = 256 }",
        _NUMBERS: _MIXTURE_EXAMPLE,
    }
    default = examples.get(kind, known[key].default)
    no_example = known[key].is_required() or default is None or isinstance(default, bool)
    nouns = {"integer": "an integer", "number": "a finite number", "text": "text", "true or false": "true or false"}
    return f"{subject} must be {nouns.get(kind, f'a {kind}')}" + ("" if no_example else f", such as {default!r}")


def _suggest(word: str, choices: Iterable[object], what: str, prefix: str = "") -> str:
    """'did you mean ...?' with the nearest choice, or the list of all choices."""
    names = [str(choice) for choice in choices]
    last = word.rpartition(".")[2]
    near = [name for name in names if name.rpartition(".")[2] == last]  # the right key in the wrong section
    near = near or difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    if near:
        return f"did you mean '{prefix}{near[0]}'?"
    return f"valid {what}s: {', '.join(names)}" if len(names) <= 20 else f"'boost config --fields' lists all {what}s"
