"""Names from files that become paths. They may come from strangers, so all are checked here."""

import os
import re
from pathlib import Path

from boost.config.text import brief
from boost.errors import BoostError, DataError

_MAX_BYTES = 200
"""Of a name. File systems allow 255, including the suffix that a caller may add."""


def file_name(
    name: object, file: Path | str, field: str, error: type[BoostError] = DataError, nested: bool = False
) -> str:
    """Returns `name`, which `field` of `file` contains, if it names an entry of a folder on every system; raises `error` if not.

    `nested`: the name may be a relative path with forward slashes.
    """
    if reason := _unsafe(name, nested):
        raise error(f"'{file}': {field} = {brief(name)} is not a file name ({reason}); rename or remove it")
    return str(name)


def _unsafe(name: object, nested: bool) -> str:
    """Why a name may lead out of its folder or cannot be created; '' if it is safe."""
    if not isinstance(name, str):
        return "it is not text"
    if nested and "/" in name:
        return next((reason for part in name.split("/") if (reason := _unsafe(part, nested=False))), "")
    if name in ("", ".", ".."):
        return f"{name!r} is not the name of a file"
    if "/" in name or "\\" in name:
        return "it contains a path separator"
    if "\0" in name:
        return "it contains a NUL"
    if re.match("[A-Za-z]:", name):
        return "it begins with a drive"
    try:
        return "" if len(os.fsencode(name)) <= _MAX_BYTES else f"it is longer than {_MAX_BYTES} bytes"
    except UnicodeEncodeError:
        return "it is not valid Unicode"
