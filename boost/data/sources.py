"""Inputs of `boost prepare`: files and folders, the standard library, a Hugging Face dataset.

A source lists its files when it is created, so a missing file is found before any work is done. It can be read more than once:
`documents(report)` yields its documents in a fixed order and records what it read and skipped in the report. `fingerprint()`
identifies a source without reading it, as JSON values (for files: names, sizes and modification times). `size` is its size on disk
in bytes, or None for a stream.
"""

import os
import stat
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from boost.data.conversations import read_conversations
from boost.data.hub import HubSource
from boost.data.readers import Document, Unreadable, read_file
from boost.data.report import PrepareReport
from boost.data.store import STORE_FILE
from boost.data.writer import is_leftover
from boost.errors import DataError

# `datasets` writes these files in save_to_disk: the first to the folder of all splits, the others to the folder of each split.
DATASET_DICT = "dataset_dict.json"
DATASET_METADATA = {"dataset_info.json", "state.json"}
STDLIB_SKIPPED = {"site-packages", "dist-packages", "lib-dynload", "_bundled", "__pycache__"}
STDLIB_SKIPPED |= {"test", "tests", "idlelib", "idle_test"}
"""Folders to skip: third-party packages are not part of the standard library; tests and bundled tools would be half of the text."""


@dataclass(frozen=True)
class InputFile:
    """A file to read. `explicit` files were named by the user, so an unreadable one is an error."""

    path: Path
    key: str
    explicit: bool
    size: int = 0
    mtime_ns: int = 0
    refused: str = ""


@dataclass
class SeenInputs:
    """Real paths and document keys from earlier inputs on the same command line."""

    paths: set[str] = field(default_factory=set)
    keys: set[str] = field(default_factory=set)


AGAIN = "nothing was written; run the command again when nothing else is writing to the input"


def require_unchanged(path: Path, size: int, mtime_ns: int) -> None:
    """Raises `DataError` if a file has changed since it was listed: a store must not mix two versions of it."""
    try:
        about = path.stat()
    except OSError as error:
        raise DataError(f"{path} disappeared during preparation ({error.strerror}); {AGAIN}") from None
    if (about.st_size, about.st_mtime_ns) != (size, mtime_ns):
        raise DataError(f"{path} changed during preparation; {AGAIN}")


class FilesSource:
    """One path on the command line: a file, or a folder that is walked in sorted order.

    Hidden files and folders are skipped and reported. Symbolic links to folders are not followed, and a file that
    can be reached twice is read once. Keys are paths relative to the folder, so moving a corpus does not change its split.
    """

    def __init__(
        self, path: str | Path, text_field: str | None = None, seen: SeenInputs | None = None, chat: bool = False
    ) -> None:
        """`chat`: the files hold conversations. Raises `DataError` if there is nothing at the path."""
        self.path, self.name, self.text_field, self.chat = Path(path), str(path), text_field, chat
        self._skipped: list[tuple[str, str]] = []
        self._seen = seen or SeenInputs()
        if not self.path.exists():
            otherwise = "" if chat else ", or use --stdlib for a corpus without files"
            raise DataError(f"{path}: no such file or folder; check the spelling{otherwise}")
        if self.path.is_dir():
            self.files = [self._input(file, explicit=False) for file in self._walk()]
        else:
            self.files = [self._input(self.path, explicit=True)]
        self.size: int | None = sum(file.size for file in self.files)

    def _walk(self) -> Iterator[Path]:
        def unreadable(error: OSError) -> None:
            raise DataError(f"{error.filename}: {error.strerror}; make the folder readable or leave it out")

        for folder, folders, names in os.walk(self.path, onerror=unreadable):
            if {STORE_FILE, "train.tokens"} <= set(names):
                # Otherwise a store inside its own input would become input to the next run.
                self._skip(folder, "a token store")
                folders.clear()
                continue
            if DATASET_DICT in names:
                if "train" not in folders:
                    splits = ", ".join(sorted(folders)) or "none"
                    raise DataError(
                        f"{folder}: this saved dataset has no train split; pass the folder of one of its splits: {splits}"
                    )
                for name in sorted({*folders} - {"train"}):
                    self._skip(os.path.join(folder, name), "not the train split; to read it, pass its folder")
                folders[:] = ["train"]
            metadata = DATASET_METADATA if set(names) >= DATASET_METADATA else {DATASET_DICT} & set(names)
            for name in sorted(metadata):
                self._skip(os.path.join(folder, name), "metadata of a saved dataset")
            names = [name for name in names if name not in metadata]
            for name in sorted((*folders, *names)):
                if name.startswith("."):
                    self._skip(os.path.join(folder, name), "hidden")
            folders[:] = sorted(name for name in folders if not name.startswith(".") and not is_leftover(name))
            yield from (
                Path(folder, name) for name in sorted(names) if not name.startswith(".") and not is_leftover(name)
            )

    def _skip(self, path: str, reason: str) -> None:
        self._skipped.append((os.path.relpath(path, self.path), reason))

    def _input(self, path: Path, explicit: bool) -> InputFile:
        key = path.name if explicit else path.relative_to(self.path).as_posix()
        try:
            about = path.stat()
        except OSError as error:
            return InputFile(path, key, explicit, refused=f"cannot be opened: {error.strerror}")
        if not stat.S_ISREG(about.st_mode):
            return InputFile(path, key, explicit, refused="not a regular file")
        real = os.path.realpath(path)
        if real in self._seen.paths:
            return InputFile(path, key, False, refused="already read under another name")
        self._seen.paths.add(real)
        # Documents with the same key would share a split.
        number, name = 2, key
        while key in self._seen.keys:
            number, key = number + 1, f"{name}#{number}"
        self._seen.keys.add(key)
        return InputFile(path, key, explicit, about.st_size, about.st_mtime_ns)

    def documents(self, report: PrepareReport) -> Iterator[Document]:
        section = report.source(self.name)
        for name, reason in self._skipped:
            section.file(name).skip(reason)
        for file in self.files:
            entry = section.file(file.key)
            try:
                if file.refused:
                    raise Unreadable(file.refused)
                require_unchanged(file.path, file.size, file.mtime_ns)
                if file.size == 0:
                    entry.skip("empty")
                    continue
                try:
                    if self.chat:
                        yield from read_conversations(file.path, file.key, entry, report)
                    else:
                        yield from read_file(file.path, file.key, self.text_field, entry, report)
                except OSError as error:
                    raise Unreadable(f"cannot be read: {error.strerror or error}") from error
                require_unchanged(file.path, file.size, file.mtime_ns)
            except Unreadable as problem:
                if file.explicit:
                    raise DataError(f"{file.path}: {problem}") from problem
                entry.skip(problem.reason, problem.where, problem.documents)

    def fingerprint(self) -> list[Any]:
        return [[file.key, file.size, file.mtime_ns] for file in self.files]


class StdlibSource(FilesSource):
    """The Python files of the running interpreter's standard library: a corpus that needs no download."""

    def __init__(self, root: str | Path | None = None) -> None:
        super().__init__(root or sysconfig.get_paths()["stdlib"])
        self.name = "Python standard library"

    def _walk(self) -> Iterator[Path]:
        paths: list[Path] = []
        for folder, folders, names in os.walk(self.path):
            folders[:] = [
                name for name in folders if name not in STDLIB_SKIPPED and not name.startswith((".", "config-"))
            ]
            paths += (path for path in (Path(folder, name) for name in names if name.endswith(".py")) if path.is_file())
        return iter(sorted(paths, key=Path.as_posix))


Source = FilesSource | HubSource
"""One input; the standard library is a `FilesSource`."""
