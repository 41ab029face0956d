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

from boost.data.readers import Document, accept
from boost.data.report import FileReport, PrepareReport
from boost.data.sources import FilesSource, InputFile
from boost.errors import DataError

# Third-party packages are excluded; tests and bundled tools would be half of the text.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "lib-dynload", "_bundled", "__pycache__"}
SKIPPED_FOLDERS |= {"test", "tests", "idlelib", "idle_test"}
# Importing these touches the terminal or opens a display, or they only test the interpreter.
UNSAFE_MODULES = re.compile(r"_?(test|xx|readline|tkinter|curses|ctypes_test|crypt|nis|dbm|gdbm)")


class StdlibSource(FilesSource):
    """The standard library of the running interpreter, as a source."""

    def __init__(self, root: str | Path | None = None) -> None:
        self.root, self.name = Path(root or sysconfig.get_paths()["stdlib"]), "Python standard library"
        self.text_field, self.chat, self._skipped = None, False, []
        paths = sorted((path.relative_to(self.root).as_posix(), path) for path in self._walk())
        if not paths:
            raise DataError(f"{self.root}: no standard library sources found; name text files or folders instead")
        stats = [(key, path, path.stat()) for key, path in paths]
        self.files = [InputFile(path, key, False, about.st_size, about.st_mtime_ns) for key, path, about in stats]
        self.size = sum(file.size for file in self.files)
        self.modules = documented_modules()

    def _walk(self) -> Iterator[Path]:
        for folder, folders, names in os.walk(self.root):
            folders[:] = [f for f in folders if f not in SKIPPED_FOLDERS and not f.startswith((".", "config-"))]
            paths = (Path(folder, name) for name in names if name.endswith(".py"))
            yield from (path for path in paths if path.is_file())

    def documents(self, report: PrepareReport) -> Iterator[Document]:
        yield from super().documents(report)
        for name in self.modules:
            entry = report.sources[-1].file(f"documentation of {name}")
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
        return [sys.version, self.modules, super().fingerprint()]


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
