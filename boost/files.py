"""Writes files and folders that appear at their final path at once: first under a name of this process alone, then by a rename."""

import contextlib
import errno
import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from boost.errors import ConfigError, StorageError
from boost.paths import is_file, status


def temporary_sibling(final: Path) -> Path:
    """An unused path next to `final`, which no other process uses. Its name is reserved (`remove_leftovers`)."""
    return final.with_name(f".{final.name}.{uuid.uuid4().hex[:8]}.boost-tmp")


def remove_leftovers(final: Path) -> None:
    """Removes what killed processes left at a `temporary_sibling`. No other process may be writing `final`."""
    name = re.compile(rf"\.{re.escape(final.name)}\.[0-9a-f]{{8}}\.boost-tmp")
    for path in final.parent.iterdir():
        if name.fullmatch(path.name):
            remove(path)


def remove(path: Path) -> None:
    """Removes as much as possible of a folder or a file."""
    if os.path.isdir(path) and not os.path.islink(path):  # which never raise
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def require_free(path: Path, field: str) -> None:
    """Raises ConfigError if a new folder's path exists, unless it is an empty folder."""
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ConfigError(f"{field} = '{path}' exists and is not an empty folder; choose another path, or remove it")


def require_open_files(number: int) -> None:
    """Raises OSError if the system does not allow this process to open so many more files: torch would wait for a store or a peer
    whose files it could not open."""
    with contextlib.ExitStack() as opened:
        for _ in range(number):
            opened.enter_context(open(os.devnull, "rb"))


@contextlib.contextmanager
def new_folder(path: Path, field: str) -> Iterator[Path]:
    """Yields an empty temporary folder, which the caller renames to `path`; if it still exists on exit, it is removed.

    Raises ConfigError, naming the `field`, if `path` is not free or another process is writing it, and StorageError if something
    cannot be written.
    """
    final = path.resolve()
    temporary = temporary_sibling(final)
    with contextlib.ExitStack() as stack:
        try:
            final.parent.mkdir(parents=True, exist_ok=True)
            try:
                stack.enter_context(exclusive(final.with_name(f".{final.name}.boost-lock")))
                remove_leftovers(final)
            except BlockingIOError:
                raise ConfigError(
                    f"{field} = '{path}' is being written by another process; wait for it, or choose another path"
                ) from None
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):  # a file system without locks
                    raise
            require_free(path, field)  # with the lock, because another process may just have finished
            temporary.mkdir()
            yield temporary
        except OSError as error:
            raise StorageError(f"{field} = '{path}' cannot be written: {error.strerror or error}") from None
        finally:
            remove(temporary)


def replace_text(path: Path, text: str) -> None:
    """Writes a UTF-8 file: a reader, or a process that is killed meanwhile, finds the old text or the new one. Raises OSError."""
    if status(path) and not is_file(path):  # a pipe or a device, such as /dev/stdout
        path.write_text(text, encoding="utf-8", newline="\n")
        return
    final = path.resolve()  # replace the file, not a link to it
    draft = temporary_sibling(final)
    try:
        draft.write_text(text, encoding="utf-8", newline="\n")
        if status(final):
            shutil.copymode(final, draft)
        draft.replace(final)
    finally:
        draft.unlink(missing_ok=True)


@contextlib.contextmanager
def storage_errors(directory: Path | str) -> Iterator[None]:
    """Converts an OSError in the run directory to a one-line StorageError."""
    try:
        yield
    except OSError as error:
        where, reason = f" ({error.filename})" if error.filename else "", error.strerror or error
        links: list[Path] = []
        with contextlib.suppress(OSError):  # the system cannot tell whether it is one
            links = [
                path for path in (Path(directory), *Path(directory).parents) if path.is_symlink() and not status(path)
            ]
        if links:
            where, reason = "", f"'{links[0]}' is a link to '{links[0].readlink()}', which does not exist"
        raise StorageError(
            f"run.dir = '{directory}' cannot be written: {reason}{where}; "
            "free disk space, fix the path, or choose another --run.dir"
        ) from error


@contextlib.contextmanager
def exclusive(lock: Path) -> Iterator[None]:
    """Holds a lock file, which it removes at the end. Raises BlockingIOError if another process holds it, and OSError if the file
    system has no locks."""
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The previous holder may have removed the file between our open and our lock; in that case, we hold a deleted file.
            if lock.exists() and os.path.samestat(os.fstat(descriptor), os.stat(lock)):
                break
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(descriptor)
