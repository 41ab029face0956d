"""Text from files and people: read with a word for what is wrong with it, and shown without what a terminal would obey."""

import tomllib
from pathlib import Path
from typing import Any

from boost.errors import ConfigError

_MARKS = {b"\xff\xfe\0\0": "UTF-32", b"\0\0\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
"""What a file begins with that an editor saved in another encoding; the longer ones first."""
_SHOWN = 80
"""Characters of a value in a message."""


def read_toml(path: Path) -> dict[str, Any]:
    """The document of a TOML file. A byte order mark is passed over. Raises ConfigError, naming the file."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    if encoding := foreign_encoding(data):
        raise ConfigError(f"{path} is {encoding} text; save it as UTF-8 (a configuration is TOML)")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a UTF-8 text file (byte {error.start}); a configuration is TOML") from None
    return parse_toml(text, str(path))


def parse_toml(text: str, source: str) -> dict[str, Any]:
    """A TOML document; `source`: where it is from, for the error. Raises ConfigError."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ConfigError(f"{source} is not TOML of ours: values are nested too deeply") from None
    except ValueError as error:  # of tomllib's, or an integer of more digits than Python reads
        raise ConfigError(f"{source} is not TOML: {brief_text(str(error), 200)}") from None


def foreign_encoding(data: bytes) -> str | None:
    """The encoding that the first bytes speak of, where it is not UTF-8."""
    for mark, name in _MARKS.items():
        if data.startswith(mark):
            return name
    if b"\0" not in data[:200]:
        return None
    halves = data[:200:2], data[1:200:2]  # ASCII in UTF-16 without a mark: every other byte is zero
    return "UTF-16" if len(data) >= 4 and sum(not any(half) for half in halves) == 1 else None


def printable(text: str, keep: str = "") -> str:
    """The text with control characters, bytes that are no UTF-8 and marks of writing direction as escapes, but for `keep`.

    Names and values of others come to the terminal in messages; raw, they could clear it, rename it or hide what follows.
    """
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode("ascii") for c in text)


def brief(value: object) -> str:
    """A value as it is written in a message, shortened."""
    try:
        return brief_text(repr(value))
    except ValueError:
        return "an integer of thousands of digits"
    except RecursionError:
        return "a value that is nested too deeply"


def brief_text(text: str, length: int = _SHOWN) -> str:
    """The beginning of a text, and how long it is, if it is too long for a message."""
    return text if len(text) <= length else f"{text[: length - 20]}... ({len(text)} characters)"
