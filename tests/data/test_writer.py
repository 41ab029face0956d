"""A store appears under its name complete, or the previous one stays, whenever the process is killed."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from boost.data.prepare import PrepareOptions, prepare
from boost.data.store import TokenStore
from boost.data.verify import verify
from boost.data.writer import locked, new_store, save_progress, sibling
from boost.errors import DataError, UnreadableDataError
from tests.data.kills import killed_at


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two finished stores of different texts."""
    folder = tmp_path_factory.mktemp("stores")
    for name in ("one", "two"):
        (folder / name).mkdir()
        for i in range(20):
            (folder / name / f"{i}.txt").write_text(f"text {name} {i}\n" * 5)
        prepare(PrepareOptions(out=folder / f"{name}.store", inputs=(str(folder / name),), tokenizer="train:270"))
    return folder / "one.store", folder / "two.store"


def content(store: Path) -> str:
    """The content of the store, after verification."""
    opened = TokenStore.open(store)
    verify(opened)
    return opened.content("train")


def replace(store: Path, by: Path) -> None:
    with new_store(store, "other input", overwrite=True) as unfinished:
        for file in by.iterdir():
            shutil.copyfile(file, unfinished.folder / file.name)


@pytest.mark.slow
def test_a_kill_at_any_file_event_leaves_one_whole_store(stores: tuple[Path, Path], tmp_path: Path) -> None:
    old, new = (content(store) for store in stores)
    store, seen, event = tmp_path / "store", set(), 0
    shutil.copytree(stores[0], store)
    while killed_at(event, lambda: replace(store, stores[1])):
        event += 1 if event >= 24 else 4  # before the new store is complete, there is nothing but a temporary folder
        if store.exists():
            assert content(store) in (old, new)
        else:
            with pytest.raises(DataError, match="its replacement was interrupted; rerun 'boost prepare'"):
                TokenStore.open(store)
        with locked(store):  # what the next `boost prepare` does first
            found = content(store)
        assert found in (old, new)
        seen.add(found)
        assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("store")) == ["store"]
        if found == new:
            replace(store, stores[0])
    assert content(store) == new and seen == {old, new} and event > 20


def test_what_cannot_be_read_back_gets_no_name(stores: tuple[Path, Path], tmp_path: Path) -> None:
    store, damaged = tmp_path / "store", Path(shutil.copytree(stores[1], tmp_path / "damaged"))
    tokens = (damaged / "train.tokens").read_bytes()
    (damaged / "train.tokens").write_bytes(tokens[:-1] + bytes([tokens[-1] ^ 1]))
    for there in (False, True):
        with pytest.raises(DataError, match=r"failed verification \(train\.tokens is damaged"):
            replace(store, damaged)
        assert store.exists() == there and not sibling(store, "tmp").exists()
        if there:
            assert content(store) == content(stores[0])
        else:
            shutil.copytree(stores[0], store)


def test_an_old_store_is_kept_while_the_new_one_cannot_be_read(stores: tuple[Path, Path], tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(stores[0], sibling(store, "old"))
    shutil.copytree(stores[1], store)
    (store / "train.tokens").write_bytes(b"")
    with locked(store):
        assert content(store) == content(stores[0])
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_a_read_that_fails_removes_nothing(
    stores: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the new store in favor of the old one, nor the progress of an interrupted run."""
    store = tmp_path / "store"
    shutil.copytree(stores[0], sibling(store, "old"))
    shutil.copytree(stores[1], store)
    shutil.copytree(stores[1], sibling(store, "tmp"))
    save_progress(sibling(store, "tmp"), {"rows": 3})
    kept = sorted(tmp_path.rglob("*"))
    for module in ("store", "writer"):
        with monkeypatch.context() as patch:
            patch.setattr(f"boost.data.{module}.read_text", fail_to_read)
            with pytest.raises(UnreadableDataError, match="cannot be read: Input/output error"), locked(store):
                pass
        assert sorted(tmp_path.rglob("*")) == kept


def fail_to_read(path: Path) -> str:
    raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
