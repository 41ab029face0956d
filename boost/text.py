"""Text from files and users: reads it with precise errors, and prints it without terminal control sequences."""

import contextlib
import io
import json
import os
import re
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

from boost.errors import ConfigError

JsonObject = dict[str, Any]
"""A decoded JSON object or TOML table. Whoever reads a value from it checks that value."""

_MARKS = {b"\xff\xfe\0\0": "UTF-32", b"\0\0\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
"""Byte order marks of encodings other than UTF-8, longest first."""

LAUNCHED = "BOOST_LAUNCHED"
"""Environment variable: `boost launch` started this process."""


def print_error(message: str) -> None:
    """Prints an error as one line on stderr, escaped because names and values in it may be untrusted.

    Under `boost launch`, leaves the line in a file of torchrun's instead: the launcher prints one error for all processes. Does not
    raise if the line cannot be written, because the caller then ends a process, or restarts others.
    """
    line = error_line(message)
    report = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if LAUNCHED in os.environ and report:
        with contextlib.suppress(OSError):
            Path(f"{report}.tmp").write_text(json.dumps({"message": line, "timestamp": time.time()}), encoding="utf-8")
            os.replace(f"{report}.tmp", report)
            return
    try:
        print(f"boost: error: {line}", file=sys.stderr, flush=True)
    except (OSError, ValueError):  # Python would try again at the end, and exit with 120
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (stays open)


def error_line(message: str) -> str:
    """A message as one printable line; only the beginning and the end of a long one, because names in it may be of any length."""
    line = printable(" ".join(message.split()))
    return line if len(line) <= 4000 else f"{line[:2000]} ... ({len(line)} characters) ... {line[-1000:]}"


TOML_LIMIT = 1 << 18
"""Maximum size of a TOML file, in bytes."""
MOST_PARTS = 16
"""Maximum number of parts of a key in TOML, such as 3 in a.b.c. The memory that a parser takes grows with their square."""
_NOT_KEYS = re.compile(r'"""(?:\\.|[^\\])*?"""|\'\'\'.*?\'\'\'|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'|#[^\n]*', re.DOTALL)
"""Strings and comments in TOML."""


def read_toml(path: Path) -> JsonObject:
    """Reads a TOML file. Ignores a UTF-8 byte order mark. Raises ConfigError, naming the file."""
    try:
        with open(path, "rb") as file:
            data = file.read(TOML_LIMIT + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    if len(data) > TOML_LIMIT:
        raise ConfigError(
            f"{path} is larger than {TOML_LIMIT:,} bytes, too large for a configuration; pass another file"
        )
    if encoding := foreign_encoding(data):
        raise ConfigError(f"{path} is {encoding} text; save it as UTF-8, which TOML requires")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        offset = f"invalid byte at offset {error.start}"
        raise ConfigError(f"{path} is not UTF-8 text ({offset}); a configuration must be a TOML file") from None
    try:
        return parse_toml(text)
    except ValueError as error:
        raise ConfigError(f"{path} is not valid TOML: {brief_text(str(error), 200)}") from None


def parse_toml(text: str) -> JsonObject:
    """Parses TOML. Raises ValueError, also for values that are nested too deeply."""
    for key in re.split(r"[\n=,{}\[\]]", _NOT_KEYS.sub("", text)):
        if key.count(".") >= MOST_PARTS:
            raise ValueError(
                f"{brief_text(key.strip())!r} has {key.count('.') + 1} parts; keys have at most {MOST_PARTS}"
            )
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("values are nested too deeply") from None


def foreign_encoding(data: bytes) -> str | None:
    """The encoding indicated by the first bytes, if it is not UTF-8; else None."""
    for mark, name in _MARKS.items():
        if data.startswith(mark):
            return name
    if b"\0" not in data[:200]:
        return None
    halves = data[:200:2], data[1:200:2]  # ASCII text in UTF-16 without a byte order mark: every other byte is 0
    return "UTF-16" if len(data) >= 4 and sum(not any(half) for half in halves) == 1 else None


def prepare_streams() -> None:
    """Opens closed standard streams on the null device; otherwise, the next files would get their descriptors, and with them what C
    code prints. Makes standard output escape characters that its encoding lacks, as standard error does, instead of raising an
    error."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)  # the lowest descriptor that is free
            os.set_inheritable(null, True)
            setattr(sys, name, open(null, "r" if name == "stdin" else "w", errors="backslashreplace"))  # noqa: SIM115 (stays open)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def printable(text: str, keep: str = "") -> str:
    """Escapes control characters, invalid UTF-8 and text direction marks, except the characters in `keep`.

    Messages contain names and values from files. Printed unescaped, they could clear the terminal, rename it or hide the text that
    follows.
    """
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode("ascii") for c in text)


def printable_text(text: str) -> str:
    """Like `printable`, but keeps line breaks, tabs and zero-width joiners (as in emoji), for longer texts."""
    return printable(text, "\n\t\N{ZERO WIDTH JOINER}\N{ZERO WIDTH NON-JOINER}")


def brief(value: object) -> str:
    """The repr of a value, shortened for a message."""
    try:
        return brief_text(repr(value))
    except ValueError:
        return "an integer with thousands of digits"
    except RecursionError:
        return "a value nested too deeply"


def brief_text(text: str, length: int = 80) -> str:
    """The text; if it is longer than `length`, its beginning and its number of characters."""
    return text if len(text) <= length else f"{text[: length - 20]}... ({len(text)} characters)"
