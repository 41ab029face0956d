"""Results that are kept while an experiment runs: written whole, and resumed only with the same settings."""

import json
from pathlib import Path

import pytest

from benchmarks.experiments.resumable import differences, keep, resumed
from boost.errors import ConfigError

SETTINGS = {"steps": 300, "sizes": (1, 2), "model": {"dim": 64}}


def test_results_are_resumed_as_they_were_kept(tmp_path: Path) -> None:
    out = tmp_path / "folder" / "x"
    fresh = {"settings": SETTINGS, "commit": "new"}
    first = resumed(fresh, {"runs": []}, out)
    assert first["runs"] == []
    first["runs"].append({"loss": 1.5})
    keep(out, first)
    assert [path.name for path in out.parent.iterdir()] == ["x.json"], "no half-written file remains"
    again = resumed({**fresh, "commit": "newer"}, {"runs": [], "timing": {}}, out)
    assert again["runs"] == [{"loss": 1.5}] and again["timing"] == {} and again["commit"] == "newer"
    keep(out, again, ".partial")
    assert resumed(fresh, {"runs": []}, out, ".partial")["runs"] == [{"loss": 1.5}]


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    out = tmp_path / "x"
    keep(out, {"settings": SETTINGS, "runs": []})
    other = {**SETTINGS, "model": {"dim": 128}}
    with pytest.raises(
        ConfigError, match=r"has results with other settings: model.dim is 64 there and 128 here; use"
    ) as error:
        resumed({"settings": other}, {"runs": []}, out)
    assert "\n" not in str(error.value)
    assert list(differences({"a": {"b": 1}, "c": 2}, {"a": {"b": 1}})) == ["c is 2 there and null here"]


def test_what_is_not_a_result_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(ConfigError, match="x.json is not JSON; remove it"):
        resumed({"settings": {}}, {}, tmp_path / "x")
    (tmp_path / "x.json").write_text(json.dumps({"experiment": "wire"}))
    with pytest.raises(ConfigError, match="x.json has no settings, so it cannot be resumed"):
        resumed({"settings": {}}, {}, tmp_path / "x")
