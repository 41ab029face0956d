"""Checks, verdicts and the report."""

import json
from pathlib import Path
from typing import Any

import pytest

from boost.measure.verify.report import SCHEMA, Check, Found, Report, Unequal, Verifier, worst_of
from boost.parallel.mesh import Mesh
from tests import toy
from tests.distributed import run_distributed


def verifier() -> tuple[Verifier, list[str]]:
    lines: list[str] = []
    return Verifier(Mesh(toy.CPU), Report(say=lines.append)), lines


def test_a_check_is_one_line_and_advice_another() -> None:
    found, lines = verifier()
    found.section("Things")
    found.check("fine", lambda: 1, lambda values: Found("ok", f"{values}"))
    found.check("odd", lambda: 2, lambda values: Found("note", "look"), advice="do that")
    found.check("wrong", lambda: 3, lambda values: Found("failed", "no", "another"), advice="do that")
    assert [line.split(maxsplit=2) for line in lines[1:]] == [
        ["ok", "fine", "[1]"],
        ["note", "odd", "look"],
        ["->", "do", "that"],
        ["FAILED", "wrong", "no"],
        ["->", "another"],
    ]
    assert [check.section for check in found.report.checks] == ["Things"] * 3
    assert (found.report.failed, found.report.exit_code) == (1, 3)
    assert found.report.summary().endswith("1 ok, 1 to review, 1 FAILED")


def test_an_exception_is_a_failure_and_the_next_check_runs() -> None:
    def fail() -> Any:
        raise RuntimeError("no such\nop")

    found, lines = verifier()
    found.section("Things")
    found.check("broken", fail, lambda values: Found("ok", ""))
    found.check("fine", lambda: 1, lambda values: Found("ok", ""))
    assert [check.verdict for check in found.report.checks] == ["failed", "ok"]
    assert "RuntimeError: no such op" in lines[1]


def fail_on_one() -> tuple[str, str]:
    mesh = toy.mesh(2)
    found = Verifier(mesh, Report(say=lambda line: None))
    found.section("Things")

    def action() -> int:
        if mesh.rank == 1:
            raise ValueError("here only")
        return 1

    with pytest.raises(Unequal):
        found.check("broken", action, lambda values: Found("ok", ""))
    return found.report.checks[0].verdict, found.report.checks[0].detail


def test_a_failure_of_one_process_is_known_to_all_and_ends_the_checks() -> None:
    assert run_distributed(2, fail_on_one) == [("failed", "rank 1: ValueError: here only")] * 2


def test_the_worst_of_all_processes_counts() -> None:
    assert worst_of([{"a": 1.0, "b": 4.0}, {"a": 3.0, "b": 2.0}]) == {"a": 3.0, "b": 4.0}


def test_a_report_is_json_that_can_be_taken_up_and_has_the_checks_so_far(tmp_path: Path) -> None:
    path = tmp_path / "v.json"
    report, other = Report(say=lambda line: None), Report(say=lambda line: None)
    report.changed = lambda: report.write(path, {}, finished=False)
    for count in (1, 2):
        report.add(Check("ok", "c", numbers={"x": 1}, section="a", name=str(count)))
        facts = json.loads(path.read_text())
        assert (facts["verdict"], len(facts["checks"])) == ("unfinished", count)
    report.write(path, {"torch": "2"})
    facts = json.loads(path.read_text())
    assert (facts["schema"], facts["verdict"], facts["environment"]) == (SCHEMA, "ok", {"torch": "2"})
    other.read(path)
    assert other.checks == report.checks
