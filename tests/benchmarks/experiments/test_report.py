"""The report page: its content, its reproducibility, and its rendering in a real browser."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import matplotlib.image
import pytest

from benchmarks.commands import main
from benchmarks.experiments import report, sections
from benchmarks.experiments.document import Goal
from benchmarks.experiments.goals import TARGETS
from benchmarks.experiments.wire_plan import BTPS, MEGATRONS, VANILLAS
from boost.errors import ConfigError, MeasurementError
from tests.benchmarks.experiments.pages import page_of, results
from tests.benchmarks.experiments.wires import made_up

__all__ = ["results"]


def test_everything_is_on_the_page_beside_its_command_and_machine(results: Path) -> None:
    html = page_of(results)
    words = re.sub(r"<[^>]+>", "", html)
    assert "python -m benchmarks steps --train.param_dtype float32 --out 'a b'" in words.replace("&#39;", "'")
    assert 'href="results/steps.json"' in html and 'href="results/gpu/steps.json"' in html
    assert '<td>2.06<td class="p">0.72' in html
    assert '<span class="badge met">met</span>' in html and f"2{report.TIMES} each, in <code>one run</code>" in html
    assert '<span class="badge skipped">skipped</span> <code>DTensor</code> is missing' in html
    assert "<td>2.06<i>2.00 to 3.10</i>" in html
    for kind in ("measured", "modeled"):
        assert f'<figcaption><span class="badge {kind}">' in html
    assert html.count("Slow CPU") >= 2 and "torch" in html and "CUDA 13.0" in html and "2026-11-20" in html


def test_goals_come_first_with_what_was_found_or_why_not(results: Path) -> None:
    html = page_of(results)
    goals_of = html[html.index('<section id="goals">') : html.index('<section id="how">')]
    assert goals_of.count('<th scope="row">') == len(TARGETS)
    assert goals_of.index("2.06\u00d7 (1.9 to 2.2)") < goals_of.index("0.03\u00d7 (1.9 to 2.2)")
    assert goals_of.count('class="badge unmet"') == 1 and goals_of.count('class="badge unknown"') == len(TARGETS) - 1
    assert "No result of <code>python -m benchmarks recompute</code>" in goals_of and "The wire." in goals_of
    assert "<b>0</b> met" in html and "<b>1</b> not met" in html and f"<b>{len(TARGETS) - 1}</b> not measured" in html


def test_machines_stand_one_under_the_other(results: Path) -> None:
    """Each has its own block and numbers, and no number combines both."""
    blocks = re.findall(r"<article>.*?</article>", page_of(results), re.DOTALL)
    assert len(blocks) == 2
    assert ["<h4>Slow CPU" in block for block in blocks] == [True, False]
    assert ["<h4>1 \u00d7 Fast GPU" in block for block in blocks] == [False, True]
    assert ["2.06" in block for block in blocks] == [True, False]
    assert ["0.03" in block for block in blocks] == [False, True]


def test_names_in_pictures_do_not_clash(results: Path) -> None:
    html = page_of(results)
    names = re.findall(r'\bid="([^"]+)"', html)
    assert len(names) > 7 and len(names) == len(set(names))
    links = re.findall(r'href="#([^"]+)"', html) + re.findall(r"url\(#([^)]+)\)", html)
    assert set(links) <= set(names)


def test_what_experiments_say_is_not_markup(results: Path) -> None:
    html = page_of(results)
    assert html.count("<script>") == 1 and "&lt;script&gt;document.title" in html and "&lt;b&gt;here" in html


def test_the_same_results_give_the_same_bytes_and_a_change_is_seen(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = results.parent / "report.html"
    command = ["report", "--results", str(results), "--out", str(out)]
    assert main([*command, "--check"]) == 1 and not out.exists()
    assert main(command) == 0
    for folder in (results, results / "gpu"):
        assert (folder / "steps.svg").read_text().startswith("<?xml")
        height, width, _ = matplotlib.image.imread(folder / "steps.png").shape
        assert (width, height) == (6 * report.DOTS_PER_INCH, 3 * report.DOTS_PER_INCH)
    assert main([*command, "--check"]) == 0
    path = results / "steps.json"
    path.write_text(path.read_text().replace("2.06", "2.07"))
    capsys.readouterr()
    assert main([*command, "--check"]) == 1
    said = capsys.readouterr().err
    assert "report.html is out of date" in said and "steps.svg" in said and "gpu" not in said


def test_results_of_several_commits_or_with_changes_are_named(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = results.parent / "report.html"
    command = ["report", "--results", str(results), "--out", str(out)]
    commit_as(results / "steps.json", "a" * 40)
    commit_as(results / "gpu" / "steps.json", "a" * 40)
    assert main(command) == 0 and main([*command, "--check", "--one-commit"]) == 0
    assert "Results of commit aaaaaaaaaa, 2026-11-20" in out.read_text(encoding="utf-8")
    commit_as(results / "gpu" / "steps.json", "a" * 40, dirty=True)
    assert main(command) == 0 and main([*command, "--check"]) == 0
    assert "Results of commit aaaaaaaaaa, 1 with uncommitted changes" in out.read_text(encoding="utf-8")
    capsys.readouterr()
    assert main([*command, "--check", "--one-commit"]) == 1
    said = capsys.readouterr().err
    assert "gpu/steps.json: of commit aaaaaaaaaa with uncommitted changes" in said and "out of date" not in said
    assert said.count("\n") == 1
    commit_as(results / "gpu" / "steps.json", "b" * 40)
    assert main(command) == 0 and main([*command, "--check", "--one-commit"]) == 1
    assert "of commit aaaaaaaaaa, most others of bbbbbbbbbb" in capsys.readouterr().err
    assert main([*command, "--one-commit"]) == 2


def commit_as(path: Path, commit: str, dirty: bool = False) -> None:
    facts = json.loads(path.read_text())
    facts["environment"]["git"] = {"commit": commit, "dirty": dirty}
    path.write_text(json.dumps(facts))


def test_without_a_result_a_number_says_so(results: Path) -> None:
    html = page_of(results)
    first = html[html.index('<header class="top"') : html.index("</header>")]
    assert first.count('<b class="none">not measured</b>') == 5 and "<svg" not in first


def test_sets_of_the_wire_are_in_the_order_of_measurement(tmp_path: Path) -> None:
    for name in ("families", "main", "many", "meshes"):
        facts = made_up(dict.fromkeys([each.name for each in (*MEGATRONS, *VANILLAS, *BTPS)], 1.0), name=name)
        (tmp_path / f"wire-{name}.json").write_text(json.dumps(facts))
    found = [result.path.stem for result in report.read_results([tmp_path])]
    assert found == ["wire-main", "wire-meshes", "wire-families", "wire-many"]


def test_what_is_no_result_is_refused(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="contains no results"):
        report.read_results([results / "none"])
    unknown = [Goal("speed of light", "", "", "", None)]
    monkeypatch.setattr(sections, "goals", lambda _: unknown)
    with pytest.raises(MeasurementError, match="'speed of light' is none"):
        page_of(results)
    (results / "odd.json").write_text(json.dumps({"experiment": "odd", "environment": {}}))
    with pytest.raises(ConfigError, match=r"odd\.json: experiment = 'odd' is unknown"):
        report.read_results([results])


def test_dtypes_are_those_of_the_numbers() -> None:
    config = {"train": {"compute_dtype": "float32"}}
    assert report.dtypes({"config": config, "rows": [1]}) == ["float32"]
    assert report.dtypes({"config": config, "rows": [{"dtype": "bfloat16"}]}) == ["bfloat16"]
    assert report.dtypes({"config": config, "losses": {"float64": [1.0]}, "hardware": {"bfloat16": 1}}) == ["float64"]


def test_a_word_is_escaped_and_signs_are_printed_as_such() -> None:
    shown: Callable[[str], str] = report.prose
    assert shown("a < b, `x >= 1 <i>`, >= 2.3x, 4 x 8, -0.5, +-10%, low-rank, 2x") == (
        "a &lt; b, <code>x &gt;= 1 &lt;i&gt;</code>, ≥ 2.3×, 4 × 8, −0.5, ±10%, low-rank, 2×"  # noqa: RUF001
    )
    assert shown("one ` alone <") == "one ` alone &lt;"
    assert report.cell("-") == report.DASH and report.cell("2.0") == "2.0"
    assert report.cell("Not met") == '<span class="badge unmet">Not met</span>'


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("1.81 (1.72 to 1.83)", "1.81<i>1.72 to 1.83</i>"),
        ("66 (57 to 70) %", "66%<i>57 to 70</i>"),
        (
            "0.99 (0.97 to 1.02), no difference shown",
            "0.99<i>0.97 to 1.02</i><small>no difference shown</small>",
        ),
        ("btp (4 to 8 GPUs) is", "btp (4 to 8 GPUs) is"),
    ],
)
def test_intervals_are_set_apart_from_their_numbers(text: str, made: str) -> None:
    assert str(report.cell(text)) == made
