"""Files of a token store as they are read and checked: arrays without a memory map, digests block by block."""

import hashlib
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from boost.errors import DataError

BLOCK_BYTES = 1 << 22
"""Bytes under one digest: a few milliseconds to read and hash."""
DIGEST_BYTES = 16


def block_digest(data: bytes | bytearray | memoryview) -> str:
    """Digest of one block: the first 32 hex digits of its sha256, which processors of today have instructions for."""
    return _shortened(hashlib.sha256(data))


def _shortened(digest: Any) -> str:
    return str(digest.hexdigest()[: 2 * DIGEST_BYTES])


class BlockDigests:
    """The digests of a file's blocks while it is written."""

    def __init__(self) -> None:
        self._done: list[str] = []
        self._open = hashlib.sha256()
        self._filled = 0

    def update(self, data: bytes) -> None:
        """Appends what is written."""
        view = memoryview(data)
        while view:
            part = view[: BLOCK_BYTES - self._filled]
            self._open.update(part)
            self._filled += len(part)
            view = view[len(part) :]
            if self._filled == BLOCK_BYTES:
                self._close()

    def finish(self) -> str:
        """All digests, one after another."""
        if self._filled:
            self._close()
        return "".join(self._done)

    def _close(self) -> None:
        self._done.append(_shortened(self._open))
        self._open, self._filled = hashlib.sha256(), 0


class FileArray:
    """A file of numbers of one dtype as a read-only array: slices are read when asked for.

    A memory map would do, but a map of a file that is truncated, or that the disk cannot read, ends the process with SIGBUS;
    here it is a `DataError`. The file stays open: one that is replaced under its name is still the one that was opened.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self.path, self.dtype = path, dtype
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from None
        weakref.finalize(self, os.close, self._descriptor)
        self._length = os.fstat(self._descriptor).st_size // dtype.itemsize

    @property
    def n_bytes(self) -> int:
        """Bytes of all elements."""
        return self._length * self.dtype.itemsize

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, where: int | slice) -> Any:
        if isinstance(where, slice):
            start, stop, step = where.indices(self._length)
            assert step == 1, "only contiguous slices are read"
            return self._read(start, max(stop - start, 0))
        index = where + self._length if where < 0 else where
        if not 0 <= index < self._length:
            raise IndexError(where)
        return self._read(index, 1)[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.asarray(self[:], dtype=dtype)

    def _read(self, start: int, length: int) -> npt.NDArray[Any]:
        data = self.read_bytes(start * self.dtype.itemsize, length * self.dtype.itemsize)
        return np.frombuffer(data, dtype=self.dtype)

    def read_bytes(self, start: int, length: int) -> bytes:
        """Bytes from `start`. Raises `DataError` if the file has fewer than when it was opened, or cannot be read."""
        parts, left = [], length
        while left:
            try:
                part = os.pread(self._descriptor, left, start + length - left)
            except OSError as error:
                raise DataError(f"{self.path}: cannot be read any more: {error.strerror}; restore the file") from None
            if not part:
                raise DataError(
                    f"{self.path}: is shorter than when it was opened (no byte {start + length - left}); restore it"
                )
            parts.append(part)
            left -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)
