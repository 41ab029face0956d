"""Damage to any byte of a token store is detected before training, and the file is named."""

import contextlib
import errno
import fcntl
import itertools
import json
import os
import shutil
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from boost.data import blocks, verify
from boost.data.blocks import BlockDigests, block_digest
from boost.data.prepare import PrepareOptions, prepare
from boost.data.store import TokenStore
from boost.errors import DataError, StoppedError, UnreadableDataError
from boost.train.signals import StopRequest, until_stopped
from tests.data.inputs import flip, write_texts

FILES = (
    "store.json", "report.json", "tokenizer.json", "train.tokens", "train.documents", "heldout.tokens", "heldout.documents",
)  # fmt: skip
LONG_AGO = 10**18


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify")
    texts = (f"Document {i}.\n" + "some words of it.\n" * (i % 4 + 1) for i in range(30))
    inputs = (str(write_texts(folder / "texts", texts)),)
    return prepare(PrepareOptions(out=folder / "store", inputs=inputs, tokenizer="train:300")).store.path


@pytest.fixture
def store(made: Path, tmp_path: Path) -> TokenStore:
    """A separate copy with blocks small enough that a file has several."""
    path = shutil.copytree(made, tmp_path / "store")
    for file in path.iterdir():  # a file that is seconds old is not remembered
        os.utime(file, ns=(LONG_AGO, LONG_AGO))
    return TokenStore.open(path)


def open_and_verify(path: Path) -> None:
    verify.verify_once(TokenStore.open(path))


@pytest.mark.parametrize("file", FILES)
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_flipped_bit_is_found_and_its_file_named(store: TokenStore, file: str, data: Any) -> None:
    """Even if the store was verified a moment ago."""
    open_and_verify(store.path)
    bit = data.draw(st.integers(0, (store.path / file).stat().st_size * 8 - 1))
    flip(store.path / file, bit)
    try:
        if file == "store.json" and says_the_same(store):  # a line break that became a space
            return
        with pytest.raises(DataError, match=file.replace(".", r"\.")):
            open_and_verify(store.path)
    finally:
        flip(store.path / file, bit)


@pytest.mark.parametrize("name", ["blocks", "digest"])
def test_a_damaged_name_of_the_digests_is_found(store: TokenStore, name: str) -> None:
    file = store.path / "store.json"
    flip(file, 8 * (file.read_bytes().rindex(f'"{name}"'.encode()) + 1))
    with pytest.raises(DataError, match=r"store\.json"):
        open_and_verify(store.path)


def says_the_same(store: TokenStore) -> bool:
    try:
        return bool(json.loads((store.path / "store.json").read_bytes()) == store.meta)
    except ValueError:
        return False


@given(st.lists(st.integers(0, 30), max_size=12))
def test_digests_do_not_depend_on_how_a_file_is_written(lengths: list[int]) -> None:
    data = bytes(i % 251 for i in range(sum(lengths)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK_BYTES", 16)
        digests, start = BlockDigests(), 0
        for length in lengths:
            digests.update(data[start : start + length])
            start += length
        assert digests.so_far() == "".join(block_digest(data[i : i + 16]) for i in range(0, len(data), 16))


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    read: list[str] = []
    verified = verify._verify_block

    def counted(store: TokenStore, array: Any, file: str, index: int) -> None:
        read.append(file)
        verified(store, array, file, index)

    monkeypatch.setattr(verify, "_verify_block", counted)
    return read


def test_it_is_read_once_until_a_file_changes(store: TokenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    read = count_reads(monkeypatch)
    for _ in range(3):
        open_and_verify(store.path)
    assert sorted(read) == sorted(set(FILES) - {"store.json"})
    file = store.path / "heldout.tokens"
    os.utime(file, ns=(LONG_AGO, LONG_AGO + 1))
    open_and_verify(store.path)
    assert len(read) == 12
    shutil.copy2(file, store.path / "copy")  # same size and time, another inode
    os.replace(store.path / "copy", file)
    open_and_verify(store.path)
    assert len(read) == 18
    os.utime(file)  # written just now: another write may have the same time
    open_and_verify(store.path)
    open_and_verify(store.path)
    assert len(read) == 30


@pytest.mark.parametrize("content", [b"", b"[" * 10**5, b"{}", b"\xff", b"9" * 5000])
def test_a_record_that_cannot_be_read_is_no_record(
    store: TokenStore, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    open_and_verify(store.path)
    verify._record_of(store).write_bytes(content)
    read = count_reads(monkeypatch)
    open_and_verify(store.path)
    assert len(read) == 6


def test_a_store_that_is_written_while_it_is_verified(store: TokenStore) -> None:
    with pytest.raises(DataError, match="changed during verification"):
        verify.verify_once(store, lambda blocks: (os.utime(store.path / "train.tokens") for _ in blocks))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    file=st.sampled_from(FILES),
    content=st.binary(max_size=80) | st.sampled_from([b"[" * 10**5, b'{"format":' + b"9" * 5000 + b"}", b"{}", b"[]"]),
)
def test_a_store_of_any_bytes_opens_or_is_a_data_error(store: TokenStore, file: str, content: bytes) -> None:
    before = (store.path / file).read_bytes()
    (store.path / file).write_bytes(content)
    try:
        with pytest.raises(DataError):
            open_and_verify(store.path)
    finally:
        (store.path / file).write_bytes(before)


def test_a_user_without_a_home_has_a_cache_too(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as for a uid without an account
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert verify._cache_folder.__wrapped__() == tmp_path / f"boost-verified-{os.getuid()}"


def test_a_recorded_store_needs_no_lock(store: TokenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    open_and_verify(store.path)
    with held(store):
        monkeypatch.setattr(verify, "verify", None)
        open_and_verify(store.path)


def test_waiting_for_another_process_says_so_ends_and_hears_signals(
    store: TokenStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read, waits = count_reads(monkeypatch), list[None]()
    monkeypatch.setattr(verify.time, "sleep", waits.append)
    clock = itertools.count(step=verify.WAIT_S / 5)
    monkeypatch.setattr(verify.time, "monotonic", lambda: next(clock))
    with held(store), caplog.at_level("WARNING", "boost"):
        open_and_verify(store.path)
    assert 0 < len(waits) < 5 and len(read) == 6, "it reads the store itself after the limit"
    (line,) = caplog.messages
    assert line.startswith("waiting up to 30 minutes for another process") and f"verifying {store.path} (lock: " in line
    verify._record_of(store).unlink()
    with held(store), StopRequest() as request:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(StoppedError, match="SIGTERM"):
            verify.verify_once(store, until_stopped=until_stopped)
    assert request.requested and len(read) == 6


def test_a_signal_ends_the_reading(store: TokenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    read = count_reads(monkeypatch)

    def interrupted(blocks: Iterable[None]) -> Iterator[None]:
        for block in blocks:
            signal.raise_signal(signal.SIGTERM)
            yield block

    monkeypatch.setattr(verify, "_THREADS", 1)
    with StopRequest(), pytest.raises(StoppedError, match="SIGTERM"):
        verify.verify_once(store, interrupted, until_stopped)
    assert not verify._record_of(store).exists() and len(read) <= 6


@contextlib.contextmanager
def held(store: TokenStore) -> Iterator[None]:
    """Holds the lock of the store's record, as another process does."""
    with open(verify._record_of(store).with_suffix(".lock"), "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.mark.parametrize("call", ["stat", "pread"])
@pytest.mark.parametrize("file", FILES)
def test_a_read_that_fails_is_no_damage(
    store: TokenStore, monkeypatch: pytest.MonkeyPatch, file: str, call: str
) -> None:
    """An EIO says nothing about the file. The next attempt may work."""
    with failing(monkeypatch, file, call) as failed:
        said = ""
        try:
            open_and_verify(store.path)
        except UnreadableDataError as error:
            said = str(error)
    assert bool(said) == bool(failed)
    assert not said or (f"{file} cannot be read: Input/output error" in said and "try again" in said)
    open_and_verify(store.path)


@contextlib.contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, name: str, call: str) -> Iterator[list[str]]:
    """Makes a system call fail for the files of this name, whether they are given by path or by descriptor."""
    usual, failed = (
        {at: getattr(at[0], at[1]) for at in ((os, "stat"), (os, "pread"), (Path, "read_text"))},
        list[str](),
    )

    def wrapped(real: Any) -> Any:
        def call_it(of: Any, *rest: Any, **named: Any) -> Any:
            path = os.readlink(f"/proc/self/fd/{of}") if isinstance(of, int) else os.fspath(of)
            if os.path.basename(path) == name:
                failed.append(path)
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)
            return real(of, *rest, **named)

        return call_it

    with monkeypatch.context() as patch:
        patch.setattr(blocks, "PAUSES_S", (0.0,))
        for (owner, attribute), real in usual.items():
            if (attribute == "stat") == (call == "stat"):
                patch.setattr(owner, attribute, wrapped(real))
        yield failed
