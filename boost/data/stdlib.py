"""A corpus that needs no download: the sources and documentation of the installed Python standard library.

Every `.py` file is one document. Modules written in C have no Python source; their docstrings and signatures are one
document per module.
"""

import importlib
import inspect
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType
from typing import Any

from boost.data.documents import Document, Unreadable, accept
from boost.data.readers import read_file, require_unchanged
from boost.data.report import FileReport, PrepareReport
from boost.errors import DataError

# Third-party packages are excluded; tests and bundled tools would be half of the text.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "lib-dynload", "_bundled", "__pycache__"}
SKIPPED_FOLDERS |= {"test", "tests", "idlelib", "idle_test"}
# Importing these touches the terminal or opens a display, or they only test the interpreter.
UNSAFE_MODULES = re.compile(r"_?(test|xx|readline|tkinter|curses|ctypes_test|crypt|nis|dbm|gdbm)")


class StdlibSource:
    """The standard library of the running interpreter, as a source."""

    name = "Python standard library"

    def __init__(self, root: str | Path | None = None) -> None:
        self.root = Path(root or sysconfig.get_paths()["stdlib"])
        self.files = sorted(self._walk())
        if not self.files:
            raise DataError(f"{self.root}: no standard library sources found; name text files or folders instead")
        self._stats = [(key, path, path.stat()) for key, path in self.files]
        self.size: int | None = sum(found.st_size for _, _, found in self._stats)
        self.modules = documented_modules()

    def _walk(self) -> Iterator[tuple[str, Path]]:
        for folder, folders, names in os.walk(self.root):
            folders[:] = [f for f in folders if f not in SKIPPED_FOLDERS and not f.startswith((".", "config-"))]
            for name in names:
                path = Path(folder, name)
                if name.endswith(".py") and path.is_file():
                    yield path.relative_to(self.root).as_posix(), path

    def documents(self, report: PrepareReport) -> Iterator[Document]:
        section = report.source(self.name)
        for key, path, listed in self._stats:
            entry = section.file(key)
            require_unchanged(path, listed.st_size, listed.st_mtime_ns)
            try:
                try:
                    yield from read_file(path, key, "", entry, report)
                except OSError as error:
                    raise Unreadable(f"cannot be read: {error.strerror or error}") from error
            except Unreadable as problem:
                entry.skip(problem.reason, problem.where)
        for name in self.modules:
            entry = section.file(f"documentation of {name}")
            if document := self._documentation(name, entry):
                yield document

    def _documentation(self, name: str, entry: FileReport) -> Document | None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                text = render_documentation(importlib.import_module(name))
        except Exception as error:
            # An extension module whose shared library is missing in this build of Python is skipped.
            entry.skip("module cannot be imported", f"{type(error).__name__}: {error}")
            return None
        return accept(text, f"doc/{name}", "", entry)

    def fingerprint(self) -> list[Any]:
        files = [[key, found.st_size, found.st_mtime_ns] for key, _, found in self._stats]
        return [sys.version, self.modules, files]


def documented_modules() -> list[str]:
    """Names of the modules written in C that are safe to import, sorted."""
    folder = sysconfig.get_config_var("DESTSHARED")
    names = set(sys.builtin_module_names)
    if folder and os.path.isdir(folder):
        for file in os.listdir(folder):
            suffix = next((s for s in EXTENSION_SUFFIXES if file.endswith(s)), "")
            if suffix:
                names.add(file.removesuffix(suffix))
    return sorted(name for name in names if not UNSAFE_MODULES.match(name))


def render_documentation(module: ModuleType) -> str:
    """Signatures and docstrings of a module's public members, deterministic across runs."""
    parts = [f"{module.__name__}\n\n{inspect.getdoc(module) or ''}"]
    for name, member in sorted(vars(module).items()):
        if name.startswith("_"):
            continue
        if inspect.isclass(member):
            parts.append(f"class {name}{_signature(member)}\n\n{_own_doc(member)}")
            parts += [
                f"{name}.{attribute}{_signature(value)}\n\n{_own_doc(value)}"
                for attribute, value in sorted(vars(member).items())
                if not attribute.startswith("_") and _own_doc(value)
            ]
        elif inspect.isroutine(member):
            parts.append(f"{name}{_signature(member)}\n\n{_own_doc(member)}")
    # The repr of a default value may contain a memory address.
    return re.sub(r" at 0x[0-9a-fA-F]+", "", "\n\n".join(part.rstrip() for part in parts)) + "\n"


def _own_doc(member: object) -> str:
    text = getattr(member, "__doc__", None)
    return inspect.cleandoc(text) if isinstance(text, str) else ""


def _signature(member: Any) -> str:
    try:
        return str(inspect.signature(member))
    except (TypeError, ValueError):
        return ""
