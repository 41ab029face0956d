"""The report page: it is reproducible, names results of other commits, and refuses what is no result."""

import json
from pathlib import Path

import pytest

from benchmarks.commands import main
from benchmarks.experiments import report, sections
from benchmarks.experiments.results import Facts, Figure, Goal, MeasurementError, Section, Table, facts_of
from boost import drawing
from boost.config import load
from boost.errors import ConfigError


def draw(facts: Facts, path: Path) -> None:
    figure, axis = drawing.pyplot().subplots(figsize=(6, 3))
    axis.plot(facts["seconds"], label="btp")
    axis.set_title("seconds")
    drawing.write(figure, path)


def section(facts: Facts) -> Section:
    table = Table("Seconds, measured.", ("layout", "step s:"), (("btp", f"{facts['seconds'][0]:.2f}"),))
    return Section("Steps", (table, Figure("steps", "Seconds of a step.", lambda path: draw(facts, path))))


def goals(facts: Facts) -> list[Goal]:
    found = f"{facts['seconds'][0]:.2f}x (1.9 to 2.2)"
    what = "layout machinery at TP=1 against plain PyTorch modules"
    return [Goal(what, "<= 1.00x", "d 1024", found, False, remark="The wire.")]


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two results of one experiment, from a CPU and from a GPU."""
    monkeypatch.setattr(sections, "section", section)
    monkeypatch.setattr(sections, "goals", goals)
    folder = tmp_path / "results"
    (folder / "gpu").mkdir(parents=True)
    facts = facts_of("steps", load("demo"), seconds=[2.06, 3.0, 2.5])
    facts["environment"] |= {"cpu": "Slow CPU", "gpus": [], "started": "2026-11-20T10:00:00+00:00"}
    (folder / "steps.json").write_text(json.dumps(facts))
    facts["environment"] |= {"gpus": ["Fast GPU"], "cuda": "13.0"}
    (folder / "gpu" / "steps.json").write_text(json.dumps(facts | {"seconds": [0.03, 0.04, 0.03]}))
    return folder


def test_the_same_results_give_the_same_bytes_and_a_change_is_seen(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = results.parent / "report.html"
    command = ["report", "--results", str(results), "--out", str(out)]
    assert main([*command, "--check"]) == 1 and not out.exists()
    assert main(command) == 0
    for folder in (results, results / "gpu"):
        assert (folder / "steps.svg").read_text().startswith("<?xml")
    assert main([*command, "--check"]) == 0
    path = results / "steps.json"
    path.write_text(path.read_text().replace("2.06", "2.07"))
    capsys.readouterr()
    assert main([*command, "--check"]) == 1
    said = capsys.readouterr().err
    assert "report.html" not in said and "gpu" not in said
    assert "steps.svg" in said and "steps.md" in said


def test_results_of_several_commits_or_with_changes_are_named(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = results.parent / "report.html"
    command = ["report", "--results", str(results), "--out", str(out)]
    commit_as(results / "steps.json", "a" * 40)
    commit_as(results / "gpu" / "steps.json", "a" * 40)
    assert main(command) == 0 and main([*command, "--check", "--one-commit"]) == 0
    assert "Results from commit aaaaaaaaaa, 2026-11-20" in out.read_text(encoding="utf-8")
    commit_as(results / "gpu" / "steps.json", "a" * 40, dirty=True)
    assert main(command) == 0 and main([*command, "--check"]) == 0
    assert "Results from commit aaaaaaaaaa, 1 with uncommitted changes" in out.read_text(encoding="utf-8")
    capsys.readouterr()
    assert main([*command, "--check", "--one-commit"]) == 1
    said = capsys.readouterr().err
    assert "gpu/steps.json: from commit aaaaaaaaaa with uncommitted" in said and "out of date" not in said
    assert said.count("\n") == 1
    commit_as(results / "gpu" / "steps.json", "b" * 40)
    assert main(command) == 0 and main([*command, "--check", "--one-commit"]) == 1
    assert "from commit aaaaaaaaaa, most others from bbbbbbbbbb" in capsys.readouterr().err
    assert main([*command, "--one-commit"]) == 2


def commit_as(path: Path, commit: str, dirty: bool = False) -> None:
    facts = json.loads(path.read_text())
    facts["environment"]["git"] = {"commit": commit, "dirty": dirty}
    path.write_text(json.dumps(facts))


def test_what_is_no_result_is_refused(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="contains no results"):
        report.read_results([results / "none"])
    unknown = [Goal("speed of light", "", "", "", None)]
    monkeypatch.setattr(sections, "goals", lambda _: unknown)
    with pytest.raises(MeasurementError, match="'speed of light' is none"):
        report.make(report.read_results([results]), results.parent / "report.html")
    (results / "odd.json").write_text(json.dumps({"experiment": "odd", "environment": {}}))
    with pytest.raises(ConfigError, match=r"odd\.json: experiment = 'odd' is unknown"):
        report.read_results([results])
