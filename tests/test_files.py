"""Files and folders that appear at their path at once, each under a temporary name of its own until then."""

import errno
import os
from pathlib import Path

import pytest

from boost.errors import ConfigError, StorageError
from boost.files import exclusive, new_folder, remove_leftovers, replace_text, temporary_sibling


def test_a_text_is_replaced_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a link, too; a device is written as it is."""
    file, link = tmp_path / "file", tmp_path / "link"
    link.symlink_to(file)
    replace_text(link, "one\n")
    assert link.is_symlink() and file.read_text() == "one\n"
    (tmp_path / "usual").touch()
    assert file.stat().st_mode == (tmp_path / "usual").stat().st_mode
    file.chmod(0o640)
    replace_text(file, "one\n")
    assert file.stat().st_mode & 0o777 == 0o640
    replace_text(Path(os.devnull), "nothing")

    def fail(path: Path, target: Path) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="broken"):
        replace_text(file, "two\n")
    assert file.read_text() == "one\n" and sorted(path.name for path in tmp_path.iterdir()) == ["file", "link", "usual"]


def test_a_new_folder_is_written_by_one_process(tmp_path: Path) -> None:
    out, foreign = tmp_path / "out", tmp_path / ".out.tmp"
    foreign.mkdir()
    (foreign / "notes").touch()
    left = temporary_sibling(out)
    left.mkdir()
    with new_folder(out, "--out") as first:
        assert not left.exists() and first.is_dir(), "what a killed process left is removed"
        with pytest.raises(ConfigError, match=r"^--out = '.*/out' is being written by another process; wait"):
            new_folder(out, "--out").__enter__()
        (first / "file").touch()
        first.rename(out)
    with pytest.raises(ConfigError, match="exists and is not an empty folder"):
        new_folder(out, "--out").__enter__()
    assert (foreign / "notes").exists(), "not ours"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.tmp", "out"]


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    def write() -> None:
        with new_folder(tmp_path / "more" / "out", "--out") as folder:
            (folder / "no" / "file").touch()

    with pytest.raises(StorageError, match=r"--out = '.*out' cannot be written: No such file"):
        write()
    assert not any((tmp_path / "more").iterdir())


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EIO])
def test_without_locks_each_process_still_has_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    out = tmp_path / "out"
    monkeypatch.setattr("boost.files.fcntl.flock", refuse)
    if number == errno.EIO:
        with pytest.raises(StorageError, match="Input/output error"):
            new_folder(out, "--out").__enter__()
        return
    with new_folder(out, "--out") as first, new_folder(out, "--out") as second:
        assert first != second
        for folder in (first, second):
            (folder / "file").write_text(folder.name)
        second.rename(out)
        with pytest.raises(OSError, match="not empty"):
            first.rename(out)
    assert (out / "file").read_text() == second.name


def test_a_lock_that_was_removed_meanwhile_is_none(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with exclusive(lock):
        assert lock.exists()
        with pytest.raises(BlockingIOError):
            exclusive(lock).__enter__()
    assert not lock.exists()
    with exclusive(lock):
        pass


def test_only_names_of_this_kind_are_leftovers(tmp_path: Path) -> None:
    names = [".out.0123abcd.boost-tmp", ".out.tmp", ".outer.0123abcd.boost-tmp", ".out.0123abcd.boost-tmp.txt", "out"]
    for name in names:
        (tmp_path / name).touch()
    remove_leftovers(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[1:])
