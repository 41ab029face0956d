"""The house stands as docs/design.md draws it: imports point downwards, models know no process group, files stay readable."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "boost"
ROOMS = ("cli", "bench", "measure", "plan", "convert", "train", "data", "optim", "parallel", "models", "config")
FILES = sorted(ROOT.rglob("*.py"))
IDS = [file.relative_to(ROOT).as_posix() for file in FILES]


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names of every module that a file imports, anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("file", FILES, ids=IDS)
def test_imports_point_downwards(file: Path) -> None:
    parts = file.relative_to(ROOT).parts
    if len(parts) == 1:
        return
    names = set(imported(ast.parse(file.read_text(encoding="utf-8"))))
    level = ROOMS.index(parts[0])
    for name in names:
        room = name.split(".")[1] if name.startswith("boost.") and name.count(".") >= 1 else None
        if room in ROOMS:
            assert ROOMS.index(room) >= level, f"{parts[0]} imports {name}"
            assert parts[0] != "plan" or room in ("plan", "config"), f"plan imports {name}"
    libraries = {name.split(".")[0] for name in names}
    if parts[0] in ("plan", "config"):
        assert "torch" not in libraries
    if parts[0] == "models":
        assert not any(name.startswith("torch.distributed") for name in names)


@pytest.mark.parametrize("file", FILES, ids=IDS)
def test_files_and_functions_stay_readable(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert text.count("\n") <= 500
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 60, node.name


def test_every_room_is_named() -> None:
    rooms = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms <= set(ROOMS)


def test_tests_mirror_the_tree() -> None:
    for folder in Path(__file__).parent.iterdir():
        if folder.is_dir() and folder.name != "__pycache__":
            assert (ROOT / folder.name).is_dir(), folder.name
