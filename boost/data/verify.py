"""Verifies that the files of a token store are what `boost prepare` wrote: all of them before training, samples during training.

The whole store is read once per machine. The result is cached in `$XDG_CACHE_HOME/boost/verified` (`~/.cache/boost/verified`;
the temporary folder if that is not writable), one small file per store and host. It is valid as long as the size, modification
time and inode of every file stay the same. On each machine one process verifies and the others wait.
"""

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import random
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from boost.data.blocks import BLOCK_BYTES, DIGEST_BYTES, FileArray, block_digest
from boost.data.store import SPLITS, STORE_FILE, Split, TokenStore, damaged
from boost.errors import DataError

Progress = Callable[[Iterable[None]], Iterable[None]]
"""Wraps an iterable with one item per block, for example in a progress bar."""
_SETTLED_NS = 2 * 10**9
_THREADS = min(8, os.cpu_count() or 1)


def verify_once(store: TokenStore, progress: Progress = iter) -> None:
    """Calls `verify` unless this machine has already verified the same files. Raises DataError."""
    record = _record_of(store)
    with _locked(record):
        state: dict[str, Any] = {
            "host": socket.gethostname(),
            "store": str(store.path.resolve()),
            "files": _identities(store),
        }
        with contextlib.suppress(OSError, ValueError, RecursionError):
            if json.loads(record.read_text(encoding="utf-8")) == state:
                return
        verify(store, progress)
        if state["files"] != _identities(store):
            raise DataError(f"{store.path}: changed during verification; wait until nothing writes to it")
        newest = max(modified for _, modified, _ in state["files"].values())
        if time.time_ns() - newest < _SETTLED_NS:
            return  # a later write within the same clock tick of the file system would go unnoticed
        with contextlib.suppress(OSError):
            temporary = record.with_suffix(".tmp")
            temporary.write_text(json.dumps(state), encoding="utf-8")
            os.replace(temporary, record)


def verify(store: TokenStore, progress: Progress = iter) -> None:
    """Reads and checks every byte of a store. Raises DataError, naming the file, if any byte has changed."""
    if store.blocks is None:
        _verify_without_blocks(store, progress)
        return
    arrays = {file: FileArray(store.path / file, np.dtype(np.uint8)) for file in store.blocks}
    for file, digests in store.blocks.items():
        if len(digests) // (2 * DIGEST_BYTES) != -(-len(arrays[file]) // BLOCK_BYTES):
            raise damaged(
                store.path, f"{file} has {len(arrays[file])} bytes, which does not match its digests in {STORE_FILE}"
            )
    work = [(file, i) for file, array in arrays.items() for i in range(-(-len(array) // BLOCK_BYTES))]
    with ThreadPoolExecutor(_THREADS) as pool:  # reading and hashing both release the GIL
        try:
            for _ in progress(pool.map(lambda each: _verify_block(store, arrays[each[0]], *each), work)):
                pass
        finally:
            pool.shutdown(cancel_futures=True)


def recheck(store: TokenStore, split: Split, draw: str) -> None:
    """Verifies one block of a split's tokens, chosen by the random seed `draw`. Reads the file that the split has open, because a
    store may be replaced during a run. Does nothing for stores of earlier releases, which have no block digests. Raises
    DataError."""
    file = f"{split.name}.tokens"
    if store.blocks is not None and isinstance(split.tokens, FileArray):
        count = len(store.blocks[file]) // (2 * DIGEST_BYTES)
        _verify_block(store, split.tokens, file, random.Random(draw).randrange(count))


def _verify_block(store: TokenStore, array: FileArray, file: str, index: int) -> None:
    assert store.blocks is not None
    start = index * BLOCK_BYTES
    data = array.read_bytes(start, max(min(BLOCK_BYTES, array.n_bytes - start), 0))
    expected = store.blocks[file][index * 2 * DIGEST_BYTES : (index + 1) * 2 * DIGEST_BYTES]
    if block_digest(data) != expected:
        raise damaged(store.path, f"{file} is damaged (between bytes {start} and {start + len(data)})")
    name, _, kind = file.partition(".")
    if kind == "tokens":
        _require_known(store, name, int(np.frombuffer(data, dtype=np.dtype(store.meta["dtype"])).max()))


def _require_known(store: TokenStore, split: str, largest: int) -> None:
    if largest > store.meta["splits"][split]["largest_token"]:
        raise damaged(store.path, f"{split}.tokens contains token id {largest}, above the maximum in {STORE_FILE}")


def _verify_without_blocks(store: TokenStore, progress: Progress) -> None:
    """For stores of earlier releases, which have one digest of all tokens and none of document offsets: instead checks that every
    document ends with eos."""
    for name in SPLITS:
        split, digest = store.split(name), hashlib.sha256()
        length = BLOCK_BYTES // split.tokens.dtype.itemsize
        largest, done = -1, 0
        for start, _ in zip(range(0, split.n_tokens, length), progress(iter(lambda: None, 0)), strict=False):
            tokens = split.tokens[start : start + length]
            digest.update(tokens.tobytes())
            largest = max(largest, int(tokens.max()))
            while done < split.n_documents:
                ends = split.documents[done + 1 : done + 1 + length]
                ends = ends[: int(np.searchsorted(ends, start + len(tokens), side="right"))]
                if not len(ends):
                    break
                before = np.concatenate([split.documents[done : done + 1], ends[:-1]])
                if (ends <= before).any() or ends[0] <= start or (tokens[ends - start - 1] != split.eos).any():
                    raise damaged(store.path, f"{name}.documents is damaged (near document {done})")
                done += len(ends)
        if digest.hexdigest() != store.content(name):
            raise damaged(store.path, f"{name}.tokens is damaged")
        if done != split.n_documents:
            raise damaged(store.path, f"{name}.documents is damaged (near document {done})")
        _require_known(store, name, largest)


def _identities(store: TokenStore) -> dict[str, list[int]]:
    """Size, modification time and inode of each file: they change if the file is written or replaced."""
    found = {}
    for file in sorted(
        [*(store.blocks or (f"{n}.{kind}" for n in SPLITS for kind in ("tokens", "documents"))), STORE_FILE]
    ):
        try:
            found_stat = os.stat(store.path / file)
        except OSError as error:
            raise damaged(store.path, f"{file} cannot be read ({error.strerror})") from None
        found[file] = [found_stat.st_size, found_stat.st_mtime_ns, found_stat.st_ino]
    return found


def _record_of(store: TokenStore) -> Path:
    """Where this host caches the result. The name includes the host, because machines often share home directories but not
    disks."""
    key = block_digest(f"{socket.gethostname()}\0{store.path.resolve()}".encode("utf-8", "surrogateescape"))
    return _cache_folder() / f"{key}.json"


@functools.cache
def _cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    for folder in (Path(home, "boost", "verified"), Path(tempfile.gettempdir(), f"boost-verified-{os.getuid()}")):
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid():
                return folder
    return folder  # then nothing is cached


@contextlib.contextmanager
def _locked(record: Path) -> Iterator[None]:
    """Context manager for one process of this machine at a time, if the file system supports locks."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            file: Any = stack.enter_context(open(record.with_suffix(".lock"), "w"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
