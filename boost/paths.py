"""Checks names that become paths, and files that are read whole, because both may come from untrusted sources."""

import errno
import json
import os
import re
import stat
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter

from boost.errors import BoostError, DataError
from boost.format import format_bytes
from boost.text import JsonObject, brief

Record = TypeVar("Record")

_MAX_BYTES = 200
"""Maximum length of a name. File systems allow 255 bytes, including any suffix that a caller adds."""

READ_LIMIT = 1 << 28
"""Maximum size of a file that is read whole, in bytes. The largest tokenizers take 50 MB."""


def status(path: Path | str) -> os.stat_result | None:
    """The status of what is at a path, or None if nothing is there. Raises OSError if the system cannot tell (EIO, ESTALE,
    ETIMEDOUT, ...), which is evidence of neither: a run goes on without an answer, and writes and removes nothing there.

    `Path.exists`, `is_file` and `is_dir` raise, too, but from Python 3.14 on say no.
    """
    try:
        return os.stat(path)
    except ValueError:  # no path
        return None
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):
            return None
        raise


def is_file(path: Path | str) -> bool:
    """Whether a regular file is at a path (`status`)."""
    about = status(path)
    return about is not None and stat.S_ISREG(about.st_mode)


def is_folder(path: Path | str) -> bool:
    """Whether a folder is at a path (`status`)."""
    about = status(path)
    return about is not None and stat.S_ISDIR(about.st_mode)


def require_regular(path: Path | str) -> os.stat_result:
    """Returns the status of a regular file. Raises OSError if it does not exist, or if it is a pipe or a device (or a link to one),
    because opening or reading it might never finish."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return status


def read_text(path: Path | str, errors: str = "strict") -> str:
    """Returns the text of a regular UTF-8 file of at most READ_LIMIT bytes. Raises OSError or UnicodeDecodeError."""
    if require_regular(path).st_size > READ_LIMIT:
        raise OSError(errno.EFBIG, f"larger than {format_bytes(READ_LIMIT)}", str(path))
    return Path(path).read_text(encoding="utf-8", errors=errors)


def read_record(path: Path | str) -> JsonObject:
    """The JSON object in a file that a run keeps for itself; {} if there is none. Raises OSError if the system cannot tell, as
    `status` does."""
    try:
        value = json.loads(read_text(path)) if is_file(path) else {}
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def read_record_as(path: Path | str, kind: type[Record]) -> Record | None:
    """The record in a file that a run keeps for itself, as a dataclass; None if there is none, or none of this kind. Raises OSError
    as `read_record`."""
    try:
        return TypeAdapter(kind).validate_json(read_text(path), strict=True) if is_file(path) else None
    except (FileNotFoundError, ValueError):
        return None


def file_name(
    name: object, file: Path | str, field: str, error: type[BoostError] = DataError, nested: bool = False
) -> str:
    """Returns `name`, the value of `field` in `file`, if it is a valid file name on every system. Raises `error` otherwise.

    `nested`: the name may be a relative path with forward slashes.
    """
    if reason := _unsafe(name, nested):
        raise error(f"'{file}': {field} = {brief(name)} is not a valid file name ({reason}); rename or remove it")
    return str(name)


def _unsafe(name: object, nested: bool) -> str:
    """Why a name could escape its folder or cannot be created; '' if it is safe."""
    if not isinstance(name, str):
        return "it is not text"
    if nested and "/" in name:
        return next((reason for part in name.split("/") if (reason := _unsafe(part, nested=False))), "")
    if name in ("", ".", ".."):
        return "it is empty, '.' or '..'"
    if "/" in name or "\\" in name:
        return "it contains a path separator"
    if "\0" in name:
        return "it contains a NUL character"
    if re.match("[A-Za-z]:", name):
        return "it begins with a drive letter"
    try:
        return "" if len(os.fsencode(name)) <= _MAX_BYTES else f"it is longer than {_MAX_BYTES} bytes"
    except UnicodeEncodeError:
        return "it is not valid Unicode"
