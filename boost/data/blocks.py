"""Reads and checks the files in a token store: arrays without a memory map, and one digest per block."""

import hashlib
import logging
import os
import time
import weakref
from pathlib import Path
from typing import overload

import numpy as np
import numpy.typing as npt

from boost.errors import DataError, UnreadableDataError
from boost.paths import require_regular

log = logging.getLogger("boost")

BLOCK_BYTES = 1 << 22
"""Bytes per digest: reading and hashing them takes a few milliseconds."""
DIGEST_BYTES = 16
PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0, 15.0)
"""Pauses before another attempt at a read that failed, in seconds: a network file system may be back within a minute."""


def block_digest(data: bytes | bytearray | memoryview) -> str:
    """Digest of one block: the first 32 hex digits of its sha256, which current CPUs compute in hardware."""
    return hashlib.sha256(data).hexdigest()[: 2 * DIGEST_BYTES]


def unreadable(file: Path, error: OSError) -> UnreadableDataError:
    """The error for a file that the system failed to read."""
    return UnreadableDataError(
        f"{file} cannot be read: {error.strerror or error}; it may be intact: check the disk or the mount, then try again"
    )


class BlockDigests:
    """Computes the digests of a file's blocks while the file is written."""

    def __init__(self) -> None:
        self._done: list[str] = []
        self._current = hashlib.sha256()
        self._filled = 0

    def update(self, data: bytes) -> None:
        """Hashes the next data written to the file."""
        view = memoryview(data)
        while view:
            part = view[: BLOCK_BYTES - self._filled]
            self._current.update(part)
            self._filled += len(part)
            view = view[len(part) :]
            if self._filled == BLOCK_BYTES:
                self._done.append(self._current.hexdigest()[: 2 * DIGEST_BYTES])
                self._current, self._filled = hashlib.sha256(), 0

    def so_far(self) -> str:
        """All digests, concatenated, as if the file ended here."""
        return "".join(self._done) + (self._current.hexdigest()[: 2 * DIGEST_BYTES] if self._filled else "")


class FileArray:
    """A file of integers in one dtype, as a read-only array; slices are read on access.

    This is not a memory map. If the file is truncated or the disk fails, a memory map kills the process with SIGBUS; this class
    raises `DataError`. The file stays open, so replacing it does not affect this reader.
    """

    def __init__(self, path: Path, dtype: np.dtype[np.integer]) -> None:
        self.path, self.dtype = path, dtype
        try:
            require_regular(path)
            self._descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise unreadable(path, error) from None
        weakref.finalize(self, os.close, self._descriptor)
        self._length = os.fstat(self._descriptor).st_size // dtype.itemsize

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, where: int) -> int: ...
    @overload
    def __getitem__(self, where: slice) -> npt.NDArray[np.integer]: ...
    def __getitem__(self, where: int | slice) -> int | npt.NDArray[np.integer]:
        if isinstance(where, slice):
            start, stop, step = where.indices(self._length)
            assert step == 1, "only contiguous slices are supported"
            return self._read(start, max(stop - start, 0))
        index = where + self._length if where < 0 else where
        if not 0 <= index < self._length:
            raise IndexError(where)
        return int(self._read(index, 1)[0])

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[np.integer]:
        return np.asarray(self[:], dtype=dtype)

    def _read(self, start: int, length: int) -> npt.NDArray[np.integer]:
        data = self.read_bytes(start * self.dtype.itemsize, length * self.dtype.itemsize)
        return np.frombuffer(data, dtype=self.dtype)

    def read_bytes(self, start: int, length: int) -> bytes:
        """`length` bytes from `start`. Raises `DataError` if the file was truncated, `UnreadableDataError` if reads fail."""
        parts, left, pauses = [], length, iter(PAUSES_S)
        while left:
            try:
                part = os.pread(self._descriptor, left, start + length - left)
            except OSError as error:
                if (pause := next(pauses, None)) is None:
                    raise unreadable(self.path, error) from None
                log.warning("%s cannot be read: %s; trying again in %g s", self.path, error.strerror, pause)
                time.sleep(pause)
                continue
            if not part:
                raise DataError(
                    f"{self.path} is shorter than when it was opened (byte {start + length - left} is missing); restore it"
                )
            parts.append(part)
            left -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)
