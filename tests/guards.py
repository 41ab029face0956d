"""Removes the guards of docs/reliability.md, one at a time, and runs the tests that must then fail: `make guards`.

    python -m tests.guards [NAME ...]

guards.toml lists the guards: functions or lines of `boost` that are replaced by careless versions in a copy of the tree. If the
tests still pass, the guard is untested, and the exit code is 1.
"""

import argparse
import ast
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILE = Path(__file__).with_suffix(".toml")


@dataclass(frozen=True)
class Guard:
    """A guard's purpose, location and replacement, and the tests that must fail without it."""

    name: str
    file: str
    place: str
    """A function, a `Class.method`, or a line of the file."""
    careless: str
    """First statement of the function, or the line's replacement."""
    tests: str
    """Arguments of pytest."""


GUARDS = tuple(Guard(**values) for values in tomllib.loads(FILE.read_text(encoding="utf-8"))["guard"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="guards whose name has one of these words (default: all)"
    )
    names = parser.parse_args().names
    chosen = [guard for guard in GUARDS if not names or any(word in guard.name for word in names)]
    untested = []
    for number, guard in enumerate(chosen, start=1):
        failed = is_noticed(guard)
        print(f"{number:3d} of {len(chosen)}  {guard.name:45s} {failed or 'NOT NOTICED'}", flush=True)
        if not failed:
            untested.append(guard.name)
    print(f"{len(chosen) - len(untested)} of {len(chosen)} guards are tested")
    return 1 if untested else 0


def is_noticed(guard: Guard) -> str | None:
    """The first test that fails without the guard, or the error that stopped the tests; None if all pass."""
    with tempfile.TemporaryDirectory(prefix="boost-guards-") as folder:
        for name in ("boost", "benchmarks", "tests", "examples", "pyproject.toml"):
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, Path(folder, name))
        file = Path(folder, "boost", guard.file)
        file.write_text(without(guard, file.read_text(encoding="utf-8")), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-xq", "--no-header", "-rfE", "--tb=no", "-pno:cacheprovider"]
        done = subprocess.run(
            [*command, "-m", "not nightly", *guard.tests.split(" ")],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": folder, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
    if done.returncode < 0:  # the careless version let a signal through
        return f"ended by {signal.Signals(-done.returncode).name}"
    if done.returncode not in (0, 1):
        raise SystemExit(f"{guard.name}: {done.stdout}\n{done.stderr}")
    return next((line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))), None)


def without(guard: Guard, text: str) -> str:
    """The source file without the guard."""
    if not guard.place.replace(".", "").isidentifier():
        if text.count(f"{guard.place}\n") != 1:
            raise LookupError(f"{guard.name}: {guard.file} does not have this line once: {guard.place}")
        return text.replace(guard.place, guard.careless)
    owner, _, name = guard.place.rpartition(".")
    body: list[ast.stmt] = ast.parse(text).body
    if owner:
        body = [part for node in body if isinstance(node, ast.ClassDef) and node.name == owner for part in node.body]
    functions = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == name]
    if not functions:
        raise LookupError(f"{guard.name}: {guard.file} has no function {guard.place}")
    (function,) = functions
    first = function.body[0]
    lines = text.splitlines(keepends=True)
    at = first.end_lineno if ast.get_docstring(function) else first.lineno - 1
    assert at is not None
    return "".join([*lines[:at], f"{' ' * first.col_offset}{guard.careless}\n", *lines[at:]])


if __name__ == "__main__":
    sys.exit(main())
