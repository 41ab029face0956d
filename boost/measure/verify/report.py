"""Checks, verdicts and the report: lines on the console while checks run, JSON at the end."""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from boost.files import replace_text, storage_errors
from boost.parallel.mesh import Mesh
from boost.text import JsonObject
from boost.train.agreement import run_on_all

SCHEMA = 1
"""Version of the JSON report; incremented with every change that affects its readers."""

Verdict = Literal["ok", "note", "skipped", "failed"]
"""note: not a failure, but worth a look; skipped: cannot be checked on these machines."""

_MARKS: dict[str, str] = {"ok": "ok", "note": "note", "skipped": "-", "failed": "FAILED"}
_WIDTH = 30
"""Width of a check's name on the console, in characters."""

T = TypeVar("T")


@dataclass(frozen=True)
class Found:
    """The result of a check over all processes."""

    verdict: Verdict
    detail: str
    """The result in one line."""
    advice: str = ""
    """Advice if the result is not ok."""
    numbers: JsonObject = field(default_factory=dict)
    """Measured numbers."""


@dataclass(frozen=True)
class Check(Found):
    """A check and its result."""

    section: str = ""
    name: str = ""
    seconds: float = 0.0


@dataclass
class Report:
    """The report on all checks in one run of `boost verify`."""

    checks: list[Check] = field(default_factory=list)
    say: Callable[[str], None] = print
    """Prints a line."""
    changed: Callable[[], None] = lambda: None
    """Called after each check, so that later failures do not lose checks that took minutes."""

    def section(self, title: str) -> None:
        self.say(f"\n{title}")

    def add(self, check: Check) -> None:
        self.checks.append(check)
        self.changed()
        self.say(f"  {_MARKS[check.verdict]:<7} {check.name:<{_WIDTH}}  {check.detail}")
        if check.advice and check.verdict in ("note", "failed"):
            self.say(f"  {'':<7} {'':<{_WIDTH}}  -> {check.advice}")

    @contextmanager
    def timed(self, section: str, name: str) -> Iterator[Callable[[Found], None]]:
        """Times a check. Yields a function that adds its result."""
        begun = time.perf_counter()

        def note(result: Found) -> None:
            self.add(Check(**asdict(result), section=section, name=name, seconds=time.perf_counter() - begun))

        yield note

    @property
    def failed(self) -> int:
        return sum(check.verdict == "failed" for check in self.checks)

    @property
    def exit_code(self) -> int:
        """0, or 3 if a check failed."""
        return 3 if self.failed else 0

    def summary(self) -> str:
        counts = Counter(check.verdict for check in self.checks)
        words: dict[Verdict, str] = {"ok": "ok", "note": "to review", "skipped": "skipped", "failed": "FAILED"}
        parts = [f"{counts[verdict]} {word}" for verdict, word in words.items() if counts[verdict]]
        seconds = sum(check.seconds for check in self.checks)
        return f"{len(self.checks)} checks in {seconds:.0f} s: {', '.join(parts) or 'none'}"

    def write(self, path: Path, environment: Mapping[str, object], finished: bool = True) -> None:
        """Writes the report as JSON. Raises StorageError if it cannot be written."""
        facts = {
            "schema": SCHEMA,
            "verdict": "failed" if self.failed else "ok" if finished else "unfinished",
            "environment": environment,
            "checks": [asdict(check) for check in self.checks],
        }
        with storage_errors(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(path, json.dumps(facts, indent=1) + "\n")

    def read(self, path: Path) -> None:
        """Adds the checks from a written report without printing them again. Raises OSError or ValueError if it is unreadable."""
        self.checks += [Check(**check) for check in json.loads(path.read_text(encoding="utf-8"))["checks"]]


class Unequal(Exception):
    """A check failed on only some processes, so the processes may be in different collectives afterwards."""


class Verifier:
    """Runs checks on all processes of a mesh; the main process reports them."""

    def __init__(self, mesh: Mesh, report: Report) -> None:
        self.mesh, self.report = mesh, report
        if not mesh.is_main:
            report.say = lambda line: None

    def section(self, title: str) -> None:
        self.report.section(title)
        self._section = title

    def check(self, name: str, action: Callable[[], T], judge: Callable[[list[T]], Found], advice: str = "") -> None:
        """Runs `action` on every process and passes the results, by rank, to `judge`. An exception counts as a failure.

        Raises Unequal if `action` failed on only some processes.
        """
        with self.report.timed(self._section, name) as note:
            outcomes: list[tuple[str, list[T]]] = run_on_all(self.mesh, lambda: _outcome(action))
            errors = {rank: text for rank, (text, _) in enumerate(outcomes) if text}
            if errors:
                rank, text = next(iter(errors.items()))
                where = f"rank {rank}: " if len(errors) < self.mesh.size or self.mesh.size == 1 else ""
                note(Found("failed", f"{where}{text}", advice))
                if len(errors) < self.mesh.size:
                    raise Unequal(name)
                return
            result = judge([value for _, values in outcomes for value in values])
            note(result if result.advice or result.verdict == "ok" else Found(**asdict(result) | {"advice": advice}))


def _outcome(action: Callable[[], T]) -> tuple[str, list[T]]:
    """Returns ("", [result]) or (error, [])."""
    try:
        return "", [action()]
    except Exception as error:
        line = " ".join(str(error).split())[:300]
        return f"{type(error).__name__}: {line}" if line else type(error).__name__, []


def worst_of(results: Sequence[dict[str, float]]) -> dict[str, float]:
    """Maximum of each number over processes."""
    return {name: max(numbers[name] for numbers in results) for name in results[0]}
