"""Kept results: written whole or not at all, resumed with the same settings only."""

import json
from pathlib import Path

import pytest

from benchmarks.experiments.kept import differences, keep, resumed
from boost.errors import ConfigError


def test_results_of_the_same_settings_are_taken_and_others_refused(tmp_path: Path) -> None:
    out = tmp_path / "new" / "result"
    fresh = {"settings": {"steps": (1, 2), "model": {"d": 8}}, "rows": [], "other": "now"}
    first = resumed(out, fresh, "rows")
    assert first == {**fresh, "settings": {"steps": [1, 2], "model": {"d": 8}}}, "as JSON has it"
    keep(out, {**first, "rows": [1], "other": "before"})
    assert [path.name for path in out.parent.iterdir()] == ["result.json"], "nothing partial is left"
    assert resumed(out, fresh, "rows") == {**first, "rows": [1]}
    assert resumed(out, {**fresh, "added": {}}, "rows", "added")["added"] == {}
    with pytest.raises(ConfigError, match=r"model.d is 8 there and 9 here; use those settings, choose another --out"):
        resumed(out, {**fresh, "settings": {"steps": [1, 2], "model": {"d": 9}}}, "rows")
    assert json.loads(out.with_suffix(".json").read_text())["rows"] == [1]


@pytest.mark.parametrize(
    ("text", "said"), [("{", "is not JSON"), ("[]", "cannot be resumed"), ("{}", "cannot be resumed")]
)
def test_what_is_no_kept_result_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(ConfigError, match=said):
        resumed(tmp_path / "r", {"settings": {}, "rows": []}, "rows")


def test_a_write_that_fails_leaves_the_last_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "r"
    keep(out, {"rows": [1]})
    with pytest.raises(TypeError):
        keep(out, {"rows": [object()]})
    assert json.loads(out.with_suffix(".json").read_text()) == {"rows": [1]}


def test_differences_name_the_setting() -> None:
    before, now = {"a": {"b": 1, "c": 2}, "d": [1]}, {"a": {"b": 1, "c": 3}, "e": None}
    assert list(differences(before, now)) == ["a.c is 2 there and 3 here", "d is [1] there and null here"]
