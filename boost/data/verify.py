"""Verifies that the files in a token store are what `boost prepare` wrote.

The whole store is read once per machine. The result is cached in `$XDG_CACHE_HOME/boost/verified` (default:
`~/.cache/boost/verified`; if not writable, the temporary folder), in one small file per store and host. A result is valid as long
as the size, modification time and inode of every file stay the same. On each machine, one process verifies and the others wait.
"""

import contextlib
import fcntl
import functools
import json
import logging
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import numpy as np

from boost.data.blocks import BLOCK_BYTES, DIGEST_BYTES, FileArray, block_digest
from boost.data.store import STORE_FILE, TokenStore, damaged, file_error
from boost.errors import DataError
from boost.files import replace_text

log = logging.getLogger("boost")

Progress = Callable[[Iterable[None]], Iterable[None]]
"""Wraps an iterable with one item per block, for example in a progress bar."""
WAIT_S = 1800.0
"""Maximum time to wait for the process that is verifying a store. Then this one reads it, too, which only takes longer."""
_SETTLED_NS = 2 * 10**9
_THREADS = min(8, os.cpu_count() or 1)


def verify_once(store: TokenStore, progress: Progress = iter, until_stopped: Progress = iter) -> None:
    """Calls `verify` unless this machine has already verified the same files. Raises DataError.

    `until_stopped` wraps all waiting and reading, and may raise an error to end it.
    """
    record = _record_of(store)
    place = {"host": socket.gethostname(), "store": str(store.path.resolve())}

    def is_recorded(files: dict[str, list[int]]) -> bool:
        with contextlib.suppress(OSError, ValueError, RecursionError):
            return bool(json.loads(record.read_text(encoding="utf-8")) == {**place, "files": files})
        return False

    if is_recorded(_identities(store)):
        return
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # the file system may not support locks
            lock = stack.enter_context(open(record.with_suffix(".lock"), "a", encoding="utf-8"))
            for _ in until_stopped(_attempts(lock, store)):
                time.sleep(0.05)
        if is_recorded(files := _identities(store)):
            return
        verify(store, lambda blocks: until_stopped(progress(blocks)))
        if files != _identities(store):
            raise DataError(f"{store.path} changed during verification; wait until nothing writes to it")
        newest = max(modified for _, modified, _ in files.values())
        if time.time_ns() - newest < _SETTLED_NS:
            return  # a later write within the same clock tick of the file system would go unnoticed
        with contextlib.suppress(OSError):
            replace_text(record, json.dumps({**place, "files": files}))


def _attempts(lock: IO[str], store: TokenStore) -> Iterator[None]:
    """Tries to lock the file until that succeeds, for at most WAIT_S seconds; yields after each failed attempt."""
    begin, said = time.monotonic(), False
    while time.monotonic() - begin < WAIT_S:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        if not said and time.monotonic() - begin > 1:
            said = True
            log.warning(
                "waiting up to %.0f minutes for another process, which is verifying %s (lock: %s)",
                WAIT_S / 60, store.path, lock.name,
            )  # fmt: skip
        yield


def verify(store: TokenStore, progress: Progress = iter) -> None:
    """Reads and checks every byte in a store. Raises DataError, naming the file, if any byte has changed."""
    arrays = {file: FileArray(store.path / file, np.dtype(np.uint8)) for file in store.blocks}
    for file, digests in store.blocks.items():
        if len(digests) // (2 * DIGEST_BYTES) != -(-len(arrays[file]) // BLOCK_BYTES):
            raise damaged(
                store.path, f"the size of {file}, {len(arrays[file])} bytes, does not match its digests in {STORE_FILE}"
            )
    work = [(file, i) for file, array in arrays.items() for i in range(-(-len(array) // BLOCK_BYTES))]
    with ThreadPoolExecutor(_THREADS) as pool:  # reading and hashing both release the GIL
        try:
            for _ in progress(pool.map(lambda block: _verify_block(store, arrays[block[0]], *block), work)):
                pass
        finally:
            pool.shutdown(cancel_futures=True)


def _verify_block(store: TokenStore, array: FileArray, file: str, index: int) -> None:
    start = index * BLOCK_BYTES
    data = array.read_bytes(start, max(min(BLOCK_BYTES, len(array) - start), 0))
    expected = store.blocks[file][index * 2 * DIGEST_BYTES : (index + 1) * 2 * DIGEST_BYTES]
    if block_digest(data) != expected:
        raise damaged(store.path, f"{file} is damaged (between bytes {start} and {start + len(data)})")
    name, _, kind = file.partition(".")
    if kind == "tokens":
        largest = int(np.frombuffer(data, dtype=np.dtype(store.meta["dtype"])).max())
        if largest > store.meta["splits"][name]["largest_token"]:
            raise damaged(store.path, f"{file} contains token id {largest}, above the maximum in {STORE_FILE}")


def _identities(store: TokenStore) -> dict[str, list[int]]:
    """Size, modification time and inode of each file: they change if the file is written or replaced."""
    identities = {}
    for file in sorted([*store.blocks, STORE_FILE]):
        try:
            about = os.stat(store.path / file)
        except OSError as error:
            raise file_error(store.path, file, error) from None
        identities[file] = [about.st_size, about.st_mtime_ns, about.st_ino]
    return identities


def _record_of(store: TokenStore) -> Path:
    """The file in which this host caches the result. Its name depends on the host, because machines often share home directories
    but not disks."""
    key = block_digest(f"{socket.gethostname()}\0{store.path.resolve()}".encode("utf-8", "surrogateescape"))
    return _cache_folder() / f"{key}.json"


@functools.cache
def _cache_folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    known = [] if cache.startswith("~") else [Path(cache, "boost", "verified")]  # a uid without an account has no home
    for folder in (*known, Path(tempfile.gettempdir(), f"boost-verified-{os.getuid()}")):
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid():
                return folder
    return folder  # no folder is writable, so nothing is cached
