"""Two small results of one experiment, from a CPU and from a GPU, and their report."""

import json
from pathlib import Path

import pytest

from benchmarks.experiments import report, sections
from benchmarks.experiments.results import Facts, Figure, Goal, Section, Table, facts_of
from boost import drawing
from boost.config import load

TITLE = "Steps <script>document.title = 'taken over'</script> & more"


def draw(facts: Facts, path: Path) -> None:
    figure, axis = drawing.pyplot().subplots(figsize=(6, 3))
    axis.plot(facts["seconds"], label="btp")
    axis.set_title("seconds")
    drawing.write(figure, path)


def section(facts: Facts) -> Section:
    rows = (
        ("btp", f"{facts['seconds'][0]:.2f}", "0.72", "met"),
        ("btp-sp", f"{facts['seconds'][0]:.2f} (2.00 to 3.10)", "0.72", "met"),
        ("peers", "-", "-", "skipped: `DTensor` is missing"),
    )
    return Section(
        TITLE,
        (
            "Both at once, 2x each, in `one run`.",
            Table("Seconds, measured.", ("layout", "step s:", "step s, paper:", "verdict"), rows),
            Table("Predictions <b>here</b>.", tuple(f"modeled {i} ms:" for i in range(14)), (("12345.6",) * 14,)),
            Figure("steps", "Seconds of a step.", lambda path: draw(facts, path)),
        ),
    )


def goals(facts: Facts) -> list[Goal]:
    found = f"{facts['seconds'][0]:.2f}x (1.9 to 2.2)"
    return [
        Goal(
            "layout machinery at TP=1 against plain PyTorch modules",
            "<= 1.00x",
            "d 1024",
            found,
            False,
            remark="The wire.",
        )
    ]


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two results of one experiment, from a CPU and from a GPU."""
    monkeypatch.setattr(sections, "section", section)
    monkeypatch.setattr(sections, "goals", goals)
    folder = tmp_path / "results"
    (folder / "gpu").mkdir(parents=True)
    facts = facts_of("steps", load("demo"), seconds=[2.06, 3.0, 2.5])
    facts["environment"] |= {"cpu": "Slow CPU", "gpus": [], "started": "2026-11-20T10:00:00+00:00"}
    facts["environment"]["command"] = [
        "python",
        "-m",
        "benchmarks",
        "steps",
        "--train.param_dtype",
        "float32",
        "--out",
        "a b",
    ]
    (folder / "steps.json").write_text(json.dumps(facts))
    facts["environment"] |= {"gpus": ["Fast GPU"], "cuda": "13.0"}
    (folder / "gpu" / "steps.json").write_text(json.dumps(facts | {"seconds": [0.03, 0.04, 0.03]}))
    return folder


def page_of(results: Path) -> str:
    return report.make(report.read_results([results]), results.parent / "report.html", png=False).html
