"""The codebase follows docs/design.md: imports point downward, and models use no process groups."""

import ast
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from boost.config.layouts import layout_names
from boost.families import CoLAConfig, DenseConfig, LaXConfig, SVDConfig
from tests.guards import GUARDS, Guard, without
from tests.train.commands import toml

REPOSITORY = Path(__file__).parent.parent
ROOT = REPOSITORY / "boost"
ROOMS = (
    *("api", "cli", "measure", "plan", "convert", "elastic", "train"),
    *("data", "optim", "nn", "layouts", "parallel", "families", "models", "config"),
)
FILES = sorted(ROOT.rglob("*.py"))
EVALUATION = sorted((REPOSITORY / "benchmarks").rglob("*.py"))
"""Not installed: it may import the package, and the package must work without it."""


@functools.cache
def nodes_of(file: Path) -> list[ast.AST]:
    """Every node of a file."""
    return list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))


def imported(file: Path) -> Iterator[str]:
    """Dotted names of all modules that a file imports, at any level."""
    for node in nodes_of(file):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def name_of(file: Path) -> str:
    return file.relative_to(REPOSITORY).as_posix()


def room_of(name: str) -> str | None:
    """The room of a module."""
    return name.split(".")[1] if name.startswith("boost.") else None


def wrong_imports(file: Path) -> Iterator[str]:
    """Forbidden imports of a file."""
    parts = file.relative_to(ROOT).parts
    if len(parts) == 1:
        return
    names = set(imported(file))
    own = room_of(".".join(("boost", *parts)).removesuffix(".py"))
    assert own is not None
    level = ROOMS.index(own)
    for name in names:
        room = room_of(name)
        # The planner runs the decoder and knows nothing of training.
        beside = own == "plan" and room not in ("plan", "layouts", "parallel", "models", "config")
        if room in ROOMS and (ROOMS.index(room) < level or beside):
            yield name
        if name.split(".")[0] == "torch" and own == "config":
            yield name
        if name.startswith("torch.distributed") and own == "models":
            yield name


def test_imports_point_downwards() -> None:
    found = {name_of(file): wrong for file in FILES if (wrong := sorted(wrong_imports(file)))}
    assert found == {}


def circles(edges: dict[str, set[str]]) -> list[set[str]]:
    """Sets of modules that import each other, directly or through others."""
    reached = {module: {module} for module in edges}
    grows = True
    while grows:
        grows = False
        for module, targets in edges.items():
            found = reached[module].union(*(reached[target] for target in targets))
            grows |= len(found) > len(reached[module])
            reached[module] = found
    mutual = {frozenset(other for other in reached[module] if module in reached[other]) for module in edges}
    return sorted((set(circle) for circle in mutual if len(circle) > 1), key=min)


def test_no_module_imports_itself_through_others() -> None:
    modules = {name_of(file).removesuffix(".py").replace("/", ".").removesuffix(".__init__"): file for file in FILES}
    edges = {
        module: {name for name in imported(file) if name in modules} - {module, "boost"}
        for module, file in modules.items()
    }
    # `from boost.x import name` names the package too, which only matters where the name is the package's own.
    for module, file in modules.items():
        for node in nodes_of(file):
            if isinstance(node, ast.ImportFrom) and node.module in modules:
                submodules = {f"{node.module}.{alias.name}" for alias in node.names}
                if submodules <= modules.keys():
                    edges[module].discard(node.module)
    assert circles(edges) == [], "also counting imports inside functions and for type checkers"


def test_the_package_does_not_need_the_evaluation() -> None:
    found = {name_of(file) for file in FILES if any(name.split(".")[0] == "benchmarks" for name in imported(file))}
    assert found == set()


def test_only_the_place_that_chooses_it_names_the_package_of_recovery() -> None:
    """Everything else of in-step recovery stands in boost/elastic."""
    found = {
        name_of(file)
        for file in FILES
        if file.relative_to(ROOT).parts[0] != "elastic" and "boost.elastic" in file.read_text(encoding="utf-8")
    }
    assert found == {"boost/train/run.py", "boost/cli/train.py"}


@pytest.mark.slow
def test_training_needs_neither_the_planner_nor_measurements(store: Path, tmp_path: Path) -> None:
    """In a copy of the package without them, whole commands work."""
    shutil.copytree(
        ROOT, tmp_path / "boost", ignore=shutil.ignore_patterns("plan", "measure", "elastic", "__pycache__")
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    (tmp_path / "run.toml").write_text(f'{toml(store, tp=1, steps=2)}dir = "{tmp_path / "run"}"\n', encoding="utf-8")
    run = str(tmp_path / "run")
    commands = (
        ("train", str(tmp_path / "run.toml")),
        ("eval", run),
        ("generate", run, "--prompt", "def", "--max-tokens", "2"),
        ("export", run, "--out", str(tmp_path / "exported")),
    )
    program = f"from boost.cli.main import main; print([main(list(words)) for words in {commands!r}])"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and done.stdout.endswith("[0, 0, 0, 0]\n"), done.stderr


def test_no_layout_is_known_by_its_name_outside_the_layouts() -> None:
    """Nothing is compared with one, or tested for membership among them."""
    names, found = set(layout_names()), []
    for file in FILES + EVALUATION:
        for node in nodes_of(file):
            if isinstance(node, ast.Compare | ast.MatchValue) and "/layouts/" not in name_of(file):
                constants = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
                found += [f"{name_of(file)}:{node.lineno}"] * bool(constants & names)
    assert found == []


KNOWS_FAMILIES = {
    # Formats of others, and the dense models that are read from them, name the linears of a LLaMA and of CoLA.
    *("convert/formats.py", "convert/modeling_boost.py", "convert/compress.py", "convert/spectrum.py"),
    # The public linear B act(A x) has options of its own, such as init="svd".
    *("nn/linear.py", "nn/functional.py", "api/swap.py"),
    # Whether a linear is that one.
    "config/linears.py",
}


def test_no_family_is_known_outside_the_families() -> None:
    """A family, an activation, a gate or a name of a map: nothing is compared with one, or tested for one at its ends."""
    families = {family.model_fields["family"].default for family in (DenseConfig, SVDConfig, CoLAConfig, LaXConfig)}
    names = {*families, "silu", "identity", "tensor", "A", "B", "W", "AB", ".A", ".B", ".W"}
    tests = ("startswith", "endswith", "removesuffix", "removeprefix")
    found = []
    for file in FILES:
        if file.parent.name == "families" or file.relative_to(ROOT).as_posix() in KNOWS_FAMILIES:
            continue
        for node in nodes_of(file):
            if isinstance(node, ast.Compare | ast.MatchValue) or (
                isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in tests
            ):
                constants = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
                found += [f"{name_of(file)}:{node.lineno}"] * bool(constants & names)
    assert found == []


def test_a_run_asks_for_files_with_three_answers() -> None:
    """`Path.exists` and the like turn "cannot tell" into an error or a no, depending on Python's version (`boost.paths.status`)."""
    found = [
        f"{name_of(file)}:{node.lineno} {node.func.attr}"
        for file in FILES
        if file.relative_to(ROOT).parts[0] in ("train", "elastic")
        for node in nodes_of(file)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if node.func.attr in ("exists", "is_file", "is_dir", "isfile", "isdir", "lexists")
    ]
    assert found == []


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.name)
def test_every_guard_is_where_the_list_says(guard: Guard) -> None:
    """`make guards` removes each; what was renamed since must not be missed until then."""
    without(guard, (ROOT / guard.file).read_text(encoding="utf-8"))
    assert all(
        (REPOSITORY / tests.partition("::")[0]).exists() for tests in guard.tests.split() if tests.startswith("tests/")
    )


def test_every_room_is_named() -> None:
    rooms = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms <= set(ROOMS)


def test_tests_mirror_the_tree() -> None:
    for folder in Path(__file__).parent.iterdir():
        # softgpu is a machine; border compares with the libraries that own a format; families are of other packages.
        if folder.is_dir() and folder.name not in ("__pycache__", "softgpu", "border", "families"):
            assert (ROOT / folder.name).is_dir() or (REPOSITORY / folder.name).is_dir(), folder.name


def test_tests_import_no_test_file() -> None:
    """Code that several tests share is in a helper module next to them."""
    here = Path(__file__).parent
    found = {}
    for file in sorted(here.rglob("*.py")):
        names = sorted(set(imported(file)))
        if wrong := [n for n in names if n.startswith("tests.") and any(p.startswith("test_") for p in n.split("."))]:
            found[file.relative_to(here).as_posix()] = wrong
    assert found == {}
