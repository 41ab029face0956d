"""The evaluation runs every launch once, resumes, merges launches, and never mixes commits."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.commands import EXPERIMENTS, build_parser
from benchmarks.experiments import evaluation
from benchmarks.experiments.contest import ratio
from benchmarks.experiments.evaluation import BENCH, Part, Place, merged
from benchmarks.experiments.results import MeasurementError, Section, facts_of
from boost.errors import ConfigError
from tests import toy

CLEAN = {"commit": "a" * 40, "dirty": False}

WRITES = """
import json, pathlib, sys
facts, out, log = sys.argv[1:4]
log = pathlib.Path(log)
log.write_text(log.read_text() + out + "\\n")
if len(log.read_text().split()) == 3 and sys.argv[4:] == ["fail"]:
    sys.exit(3)
facts = json.loads(pathlib.Path(facts).read_text())
facts["turns"]["seconds"]["a"] = [float(out[-1] if out[-1].isdigit() else 0)] * 7
pathlib.Path(out + ".json").write_text(json.dumps(facts))
sys.exit(sys.argv[4:] == ["finds"])  # a check that does not hold is a result
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    facts = facts_of("steps", toy.toy_config(), rounds=7, turns={"seconds": {"a": [], "b": [1.0] * 7}})
    (tmp_path / "facts.json").write_text(json.dumps(facts))
    (tmp_path / "log").write_text("")
    (tmp_path / "results").mkdir()
    monkeypatch.setattr(evaluation, "git_state", lambda: dict(CLEAN))
    monkeypatch.setattr(evaluation.sections, "section", lambda facts: Section("Steps", ()))
    return Place(tmp_path / "work", tmp_path / "results", "cpu")


def part(place: Place, more: str = "", **fields: Any) -> Part:
    folder = place.work.parent
    words = f"{folder}/facts.json {{out}} {folder}/log {more}"
    return Part("steps", ("-c", WRITES), words, 1, launches=3, **fields)


def without_report(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Runs parts for real, and records the command of the report."""
    reports, usual = [], evaluation._run

    def run(words: list[str], log: Path) -> int:
        if "report" in words:
            reports.append(words)
            return 0
        return usual(words, log)

    monkeypatch.setattr(evaluation, "_run", run)
    return reports


@pytest.mark.slow
def test_launches_run_once_resume_and_are_merged(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    reports, log = without_report(monkeypatch), place.work.parent / "log"
    with pytest.raises(MeasurementError, match=r"failed with exit code 3; .*; run the same"):
        evaluation.evaluate([part(place, "fail")], place)
    assert len(log.read_text().split()) == 3 and not (place.results / "steps.json").exists() and not reports
    assert "steps        2 of 3 done" in evaluation.listed([part(place)], place)
    assert evaluation.evaluate([part(place)], place) == 0
    assert [Path(line).name for line in log.read_text().split()] == ["steps-0", "steps-1", "steps-2", "steps-2"]
    facts = json.loads((place.results / "steps.json").read_text())
    assert facts["launches"] == 3
    assert facts["turns"]["seconds"] == {"a": [[0.0] * 7, [1.0] * 7, [2.0] * 7], "b": [[1.0] * 7] * 3}
    assert len(reports) == 1
    evaluation.evaluate([part(place)], place)
    assert len(log.read_text().split()) == 4, "nothing runs twice"
    evaluation.evaluate([part(place)], place, launches=4)
    assert json.loads((place.results / "steps.json").read_text())["launches"] == 4


def test_a_check_that_fails_is_a_result_and_a_part_that_fails_ends_the_evaluation(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_report(monkeypatch)
    finding = replace(part(place, "finds"), launches=1)
    assert evaluation.evaluate([finding], place) == 0
    assert (place.work.parent / "log").read_text().split() == [str(place.results / "steps")]
    assert json.loads((place.results / "steps.json").read_text())["turns"]["seconds"]["a"] == [0.0] * 7
    with pytest.raises(MeasurementError, match="other failed with exit code 1"):
        evaluation.evaluate([replace(finding, name="other", words="nothing")], place)


def test_another_commit_or_changes_are_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    without_report(monkeypatch)
    assert evaluation.evaluate([], place) == 0
    monkeypatch.setattr(evaluation, "git_state", lambda: {"commit": "b" * 40, "dirty": False})
    with pytest.raises(ConfigError, match="has launches of commit aaaaaaaaaa, but this is bbbbbbbbbb"):
        evaluation.evaluate([], place)
    for unclear in ({"commit": "a" * 40, "dirty": True}, None):
        monkeypatch.setattr(evaluation, "git_state", lambda unclear=unclear: unclear)
        with pytest.raises(ConfigError, match="without uncommitted changes"):
            evaluation.evaluate([], place)


def test_every_part_is_a_command_that_exists() -> None:
    place = Place(Path("work"), Path("results"), "cpu")
    for each in evaluation.PARTS:
        words = each.words.format(device="cpu", work=place.work, results=place.results, out="results/x").split()
        if each.module == BENCH:
            assert words[0] in EXPERIMENTS
            known, overrides = build_parser(words).parse_known_args(words)
            assert known.command == words[0]
            assert all(word.startswith("--") for word in overrides[::2]), each.name
        assert each.launches == 1 or "{out}" in each.words
    minutes = sum(each.minutes * each.launches for each in evaluation.PARTS)
    assert minutes < 180
    for path in ("Makefile", "docs/results.md"):
        assert f"about {minutes / 60:.1f} hours" in (evaluation.ROOT / path).read_text(encoding="utf-8"), minutes


ROWS = [
    {"name": "btp", "seconds": [1.0, 2.0], "sent_bytes": 4},
    {"name": "vanilla", "seconds": [3.0, 4.0], "sent_bytes": 8},
]


def result(shift: float) -> dict[str, Any]:
    turns = {"seconds": {"a": [shift, 2 * shift], "b": [1.0, 2.0]}, "repeats": {"a": 1, "b": 1}}
    facts = facts_of("steps", toy.toy_config(), rounds=2, turns=turns, groups=[{"rows": copy.deepcopy(ROWS)}])
    facts["groups"][0]["rows"][0]["seconds"] = [shift, shift]
    return facts


def test_seconds_become_launches_and_nothing_else_changes() -> None:
    one, two = result(1.0), result(3.0)
    two["environment"]["started"] = "later"
    found = merged([one, two])
    assert found["launches"] == 2 and found["rounds"] == 2
    assert found["turns"]["seconds"] == {"a": [[1.0, 2.0], [3.0, 6.0]], "b": [[1.0, 2.0], [1.0, 2.0]]}
    rows = found["groups"][0]["rows"]
    assert rows[0] == {"name": "btp", "seconds": [[1.0, 1.0], [3.0, 3.0]], "sent_bytes": 4}
    assert found["environment"] == one["environment"] and found["config"] == one["config"]
    assert ratio(found["turns"]["seconds"]["a"], found["turns"]["seconds"]["b"]).value == 2
    assert one["turns"]["seconds"]["a"] == [1.0, 2.0]


def test_launches_of_other_things_are_refused() -> None:
    for change, said in (
        (lambda facts: facts["turns"]["seconds"].pop("a"), "names below"),
        (lambda facts: facts["groups"][0]["rows"].pop(), "length of rows"),
        (lambda facts: facts["config"].update(model={}), "differ in config"),
        (lambda facts: facts.update(rounds=3), "differ in rounds: 2 and 3"),
        (lambda facts: facts["environment"].update(git=None), "differ in commit"),
        (lambda facts: facts["environment"].update(cpu="another"), "different machines"),
    ):
        other = result(1.0)
        change(other)
        with pytest.raises(MeasurementError, match=said):
            merged([result(1.0), other])
