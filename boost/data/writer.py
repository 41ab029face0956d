"""Writes a token store atomically: a reader sees the old store, the complete new one, or none.

A store is written to `STORE.boost-tmp` next to its final path and read back there. Then any older store is renamed to
`STORE.boost-old`, and the new store gets its final name. `STORE.boost-lock` is held throughout, so any `.boost-tmp` or `.boost-old`
that the lock holder finds was left by a dead process.

`TokenWriter.commit` makes the data written so far survive a kill: it syncs the files and returns their lengths. `save_progress`
writes these lengths and the input position to `resume.json`; the next run truncates the files to these lengths and continues.
"""

import contextlib
import errno
import hashlib
import io
import json
import os
import shutil
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from boost.data.blocks import BLOCK_BYTES, BlockDigests, unreadable
from boost.data.store import OFFSET_DTYPE, REPORT_FILE, SPLITS, STORE_FILE, TOKENIZER_FILE, TokenStore, with_digest
from boost.data.verify import verify
from boost.errors import DataError, StorageError, UnreadableDataError
from boost.files import exclusive
from boost.format import format_count
from boost.paths import read_text
from boost.text import JsonObject

RESUME_FILE = "resume.json"
"""In `STORE.boost-tmp`: the last commit of an unfinished store."""

_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


def sibling(store: Path, suffix: str) -> Path:
    """`STORE.boost-tmp`, `-old` or `-lock`. These names are reserved, because anything left under them is deleted."""
    return store.with_name(f"{store.name}.boost-{suffix}")


def is_leftover(name: str) -> bool:
    """Whether a file or folder name is one that `sibling` returns."""
    return name.endswith((".boost-tmp", ".boost-old", ".boost-lock"))


@contextmanager
def locked(store: Path) -> Iterator[JsonObject | None]:
    """Holds the store's lock and cleans up after an interrupted run. Yields the last commit of an unfinished store, if any. Raises
    `DataError` if another process holds the lock."""
    store.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(exclusive(sibling(store, "lock")))
        except BlockingIOError as error:
            raise DataError(f"{store}: another 'boost prepare' is writing it; wait or choose another --out") from error
        yield _recover(store)


def _recover(store: Path) -> JsonObject | None:
    """Removes an incomplete store that has no commit, or returns the commit. Restores the old store if its replacement is damaged,
    or if the replacement was interrupted between its two renames."""
    old, temporary = sibling(store, "old"), sibling(store, "tmp")
    if (saved := _read_progress(temporary / RESUME_FILE)) is None:
        remove(temporary)
    (store / RESUME_FILE).unlink(missing_ok=True)  # left by a run that was killed just after it published the store
    if not old.exists():
        return saved
    is_intact = {path: _opens(path) for path in (store, old)}
    if is_intact[store]:
        shutil.rmtree(old)
    elif not store.exists():
        os.rename(old, store)
    elif (store / STORE_FILE).exists() and is_intact[old]:
        remove(temporary)
        os.rename(store, temporary)
        os.rename(old, store)
        shutil.rmtree(temporary, ignore_errors=True)
        return None
    return saved


def _opens(store: Path) -> bool:
    try:
        TokenStore.open(store)
    except UnreadableDataError:
        raise  # says nothing about the store, which must not be removed for it
    except DataError:
        return False
    return True


@dataclass(frozen=True)
class Unfinished:
    """A store that is being written."""

    folder: Path
    """Empty, or with the files that an interrupted run committed."""
    saved: JsonObject | None
    """What an interrupted run of the same command committed."""


@contextmanager
def new_store(store: Path, fingerprint: str, overwrite: bool) -> Iterator[Unfinished | None]:
    """Yields the store to write, which becomes `store` on success, replacing an older one; None if `store` was made from the same
    input (`fingerprint`), so that there is nothing to do.

    The store is read back before it is published. On any error, an existing store is unchanged. The unfinished one is then removed,
    unless it has a commit from which the next run can continue and the error is not about the data.
    Raises `DataError` if the path has no name, another process is writing it, it may not be replaced without `overwrite`, or the
    data read back does not match, and `StorageError` if the disk is full.
    """
    if store.name in ("", ".."):
        raise DataError(f"--out {store} must name a folder, such as data/mine")
    if (store / STORE_FILE).exists() and _is_current(store, fingerprint, overwrite):
        yield None
        return
    with locked(store) as saved:
        # Checked again under the lock: another process may have restored an older store or finished a new one.
        if _is_current(store, fingerprint, overwrite):
            yield None
        else:
            saved = _of_same_input(store, saved, fingerprint, overwrite)
            with _published(store, is_continued=saved is not None) as folder:
                yield Unfinished(folder, saved)


def _is_current(store: Path, fingerprint: str, overwrite: bool) -> bool:
    """Whether the store exists and was made from this input. Raises `DataError` if it may not be replaced."""
    if not store.exists() or (store.is_dir() and not any(store.iterdir())):
        return False
    if not (store / STORE_FILE).is_file():
        # Never replaced, not even with --overwrite: it may be a user's folder of texts.
        raise DataError(f"{store} exists but is not a token store; choose another --out")
    try:
        if TokenStore.open(store).meta["input_fingerprint"] == fingerprint:
            return True
    except DataError:
        if not overwrite:
            raise
    if not overwrite:
        raise DataError(
            f"{store} already holds a token store made from different input or options; add --overwrite to replace it, "
            f"or choose another --out"
        )
    return False


def _of_same_input(store: Path, saved: JsonObject | None, fingerprint: str, overwrite: bool) -> JsonObject | None:
    """`saved` if it is of this input; without it, removes the unfinished store. Raises `DataError` if that needs `overwrite`."""
    if saved is None or saved["fingerprint"] == fingerprint:
        return saved
    if not overwrite:
        tokens = sum(sizes["tokens"] for sizes in saved["written"]["sizes"].values())
        raise DataError(
            f"{store}: an interrupted 'boost prepare' with other input or options wrote {format_count(tokens)} tokens; "
            f"repeat its command to continue, add --overwrite to discard them, or choose another --out"
        )
    remove(sibling(store, "tmp"))
    return None


@contextmanager
def _published(store: Path, is_continued: bool) -> Iterator[Path]:
    """Yields the folder of the unfinished store, which exists if it `is_continued`."""
    folder = sibling(store, "tmp")
    try:
        folder.mkdir(exist_ok=is_continued)
        yield folder
        (folder / f"{RESUME_FILE}.new").unlink(missing_ok=True)
        for path in (*folder.iterdir(), folder):
            _sync_one(path)
        try:
            verify(TokenStore.open(folder))
        except UnreadableDataError:
            raise
        except DataError as error:
            why = str(error).removeprefix(f"{folder}: ").partition(";")[0]
            raise DataError(
                f"{store}: the new store failed verification ({why}); nothing was changed; check the disk and run the command again"
            ) from None
        _publish(folder, store)
        (store / RESUME_FILE).unlink(missing_ok=True)
        _sync_one(store.parent)
    except BaseException as error:
        kept = (folder / RESUME_FILE).exists() and (not isinstance(error, DataError) or error.is_temporary)
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in _FULL:
            state = f"finished work is kept in {folder}, so a rerun continues" if kept else "nothing was changed"
            raise StorageError(
                f"{store}: {os.strerror(error.errno)} while writing; {state}; free some space or choose another --out"
            ) from error
        raise
    for leftover in (folder, sibling(store, "old")):
        remove(leftover)


def save_progress(folder: Path, progress: JsonObject) -> None:
    """Records a commit, replacing the previous one atomically."""
    temporary = folder / f"{RESUME_FILE}.new"
    content = with_digest(progress)
    temporary.write_text(json.dumps(content), encoding="utf-8")
    _sync_one(temporary)
    os.replace(temporary, folder / RESUME_FILE)
    _sync_one(folder)


def _read_progress(path: Path) -> JsonObject | None:
    """The last commit of an unfinished store; None if there is none or it is damaged. Raises UnreadableDataError."""
    try:
        progress: JsonObject = json.loads(read_text(path))
        return progress if with_digest(progress)["digest"] == progress["digest"] else None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise unreadable(path, error) from None
    except (ValueError, KeyError, AttributeError, RecursionError):
        return None


def remove(path: Path) -> None:
    """Removes a folder, or a symbolic link."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def _publish(folder: Path, store: Path) -> None:
    """Moves a complete store to its final path. The previous one is moved to `STORE.boost-old`."""
    old = sibling(store, "old")
    if store.exists():
        remove(old)  # a damaged leftover: `_recover` would have restored an intact one
        os.rename(store, old)
    try:
        os.rename(folder, store)
    except OSError:
        if old.exists():
            os.rename(old, store)
        raise


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        if hasattr(os, "posix_fadvise") and path.is_file():  # so that reading back bypasses the page cache
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


class TokenWriter:
    """Appends encoded text to the files in a folder. A context manager; `finish` completes the store."""

    def __init__(self, folder: Path, dtype: np.dtype[np.integer], committed: JsonObject | None = None) -> None:
        """`committed`: the result of `commit` to continue from. Raises `DataError` if the files no longer have that content."""
        self.folder, self.dtype = folder, dtype
        self.sizes = {name: {"tokens": 0, "documents": 0, "bytes": 0, "largest_token": 0} for name in SPLITS}
        self._digests = {name: hashlib.sha256() for name in SPLITS}
        self._files = ExitStack()
        self._blocks: dict[str, BlockDigests] = defaultdict(BlockDigests)
        self._open: dict[str, io.FileIO] = {}
        for name in SPLITS:
            for kind in ("tokens", "documents"):
                file = f"{name}.{kind}"
                self._blocks[file] = BlockDigests()  # fixes the order of the files in store.json
                if committed is not None:
                    self._reopen(file, committed)
                else:
                    self._open[file] = self._create(file)
            if committed is None:
                self._write(f"{name}.documents", bytes(OFFSET_DTYPE.itemsize))
        if committed is not None:
            self.sizes = {name: dict(committed["sizes"][name]) for name in SPLITS}

    def _create(self, name: str) -> io.FileIO:
        # Unbuffered: a full disk must fail the write, not a later close.
        return self._files.enter_context(open(self.folder / name, "wb", buffering=0))

    def _reopen(self, name: str, committed: JsonObject) -> None:
        """Opens a file at its end as of the commit, dropping whatever was written later, and checks its content."""
        split, _, kind = name.partition(".")
        sizes = committed["sizes"][split]
        size = sizes["tokens"] * self.dtype.itemsize
        if kind == "documents":
            size = (sizes["documents"] + 1) * OFFSET_DTYPE.itemsize
        file = self._open[name] = self._files.enter_context((self.folder / name).open("r+b", buffering=0))
        left = size
        while left and (data := file.read(min(left, BLOCK_BYTES))):
            left -= len(data)
            self._blocks[name].update(data)
            if kind == "tokens":
                self._digests[split].update(data)
        if left or self._blocks[name].so_far() != committed["blocks"][name]:
            raise DataError(
                f"{self.folder / name}: the file was damaged after writing; check the disk and start again from the beginning"
            )
        file.truncate(size)

    def commit(self) -> JsonObject:
        """Makes the data written so far survive a crash of the machine. Returns its sizes and digests, as JSON values."""
        for file in self._open.values():
            os.fsync(file.fileno())
        return {
            "sizes": {name: dict(self.sizes[name]) for name in SPLITS},
            "blocks": {name: self._blocks[name].so_far() for name in self._open},
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def append(self, split: str, ids: list[int], n_bytes: int, ends: list[int]) -> None:
        """Appends tokens of consecutive documents, with the eos tokens. `ends`: how many of the tokens end with each document."""
        tokens = np.asarray(ids, dtype=self.dtype)
        content = tokens.tobytes()
        self._digests[split].update(content)
        self._write(f"{split}.tokens", content)
        sizes = self.sizes[split]
        self._write(f"{split}.documents", (np.array(ends, OFFSET_DTYPE) + sizes["tokens"]).tobytes())
        sizes["tokens"] += len(tokens)
        sizes["documents"] += len(ends)
        sizes["bytes"] += n_bytes
        sizes["largest_token"] = max(sizes["largest_token"], int(tokens.max(initial=0)))

    def _write(self, name: str, data: bytes) -> None:
        self._blocks[name].update(data)
        write_all(self._open[name], data)

    def finish(self, tokenizer_json: str, meta: dict[str, object], details: dict[str, object]) -> None:
        """Writes the tokenizer, the detailed report and, last, `store.json` with `meta` and the sizes."""
        for name, text in ((TOKENIZER_FILE, tokenizer_json), (REPORT_FILE, json.dumps(details, indent=1) + "\n")):
            self._open[name] = self._create(name)
            self._write(name, text.encode())
        splits = {name: {**self.sizes[name], "sha256": self._digests[name].hexdigest()} for name in SPLITS}
        blocks = {name: digests.so_far() for name, digests in self._blocks.items()}
        content = with_digest({**meta, "dtype": self.dtype.str, "splits": splits, "blocks": blocks})
        (self.folder / STORE_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_all(file: io.FileIO, data: bytes) -> None:
    """Writes all data to an unbuffered file, whose `write` may be partial. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
