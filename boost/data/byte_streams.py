"""Opens files as streams of UTF-8 bytes: decompressed by suffix, and transcoded from UTF-16 and UTF-32."""

import bz2
import codecs
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from boost.config.text import foreign_encoding
from boost.data.documents import Unreadable, require_pyarrow
from boost.data.report import FileReport

_FORMATS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bzip2", ".xz": "xz"}
COMPRESSED_SUFFIXES = tuple(_FORMATS)
CHUNK = 1 << 20
"""Bytes to read at a time."""


def is_compressed(path: Path) -> bool:
    """Whether the suffix is one of a compressed file."""
    return path.name.lower().endswith(COMPRESSED_SUFFIXES)


@contextmanager
def open_utf8(path: Path, entry: FileReport) -> Iterator[IO[bytes]]:
    """Opens a file for reading; a UTF-8 byte order mark remains. Notes in `entry` if it was transcoded.

    Raises `Unreadable` for a damaged compressed file, here or in the body of the `with` statement.
    """
    compression = _FORMATS.get(path.suffix.lower(), "")
    try:
        with _open(path, compression) as opened:
            file = io.BufferedReader(cast(Any, opened), CHUNK)
            encoding = _foreign_codec(file.peek(200)[:200])
            if encoding:
                entry.note(f"{encoding.upper()[:6]} text, converted to UTF-8")
                file = io.BufferedReader(_Transcoder(file, encoding), CHUNK)
            yield file
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        where = "truncated" if isinstance(error, EOFError) else str(error)
        raise Unreadable(f"damaged {compression} file", where, "copy it again") from error
    except OSError as error:
        if error.errno is not None or not is_compressed(path):
            raise  # of the file system, not of the decompression
        if "too much memory" in str(error):
            fix = f"decompress it first: zstd -d --long=31 {path.name}"
            raise Unreadable("zstd file with a window above 128 MB", fix=fix) from error
        raise Unreadable(f"damaged {compression} file", str(error).splitlines()[0], "copy it again") from error


def _open(path: Path, compression: str) -> Any:
    match compression:
        case "gzip":
            return gzip.open(path, "rb")
        case "bzip2":
            return bz2.open(path, "rb")
        case "xz":
            return lzma.open(path, "rb")
        case "zstd":
            pyarrow = require_pyarrow("zstd files")
            return pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd")
    return path.open("rb", buffering=0)


def _foreign_codec(head: bytes) -> str | None:
    """The codec of text that begins with `head`, if it is UTF-16 or UTF-32; else None."""
    encoding = foreign_encoding(head)
    if encoding is None:
        return None
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)):
        return encoding.lower()
    # Without a byte order mark, an array of small integers looks the same, except that it holds control characters.
    codec = "utf-16-le" if head[1] == 0 else "utf-16-be"
    sample = head[: len(head) // 2 * 2].decode(codec, "replace")
    return codec if all(c.isprintable() or c.isspace() for c in sample) else None


class _Transcoder(io.RawIOBase):
    """A file in another encoding as UTF-8 bytes, without a byte order mark."""

    def __init__(self, file: IO[bytes], encoding: str) -> None:
        self._file, self._encoding = file, encoding
        self._decoder = codecs.getincrementaldecoder(encoding)()
        self._ready, self._read, self._ended = b"", 0, False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready and not self._ended:
            data = self._file.read(CHUNK)
            self._ended = not data
            try:
                self._ready = self._decoder.decode(data, final=self._ended).encode("utf-8")
            except UnicodeDecodeError as error:
                where = f"byte {self._read - (len(error.object) - len(data)) + error.start}"
                reason = f"damaged {self._encoding.upper()[:6]} text"
                raise Unreadable(reason, where, "save it as UTF-8") from error
            self._read += len(data)
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count
