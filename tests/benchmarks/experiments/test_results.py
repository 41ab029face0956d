"""Result files: environment, reading, and refusal to mix machines."""

import json
from pathlib import Path

import pytest

from benchmarks.experiments.results import (
    MeasurementError,
    differences,
    facts_of,
    keep,
    machine,
    read,
    require_one_machine,
    resumed,
    write_numbers,
)
from boost.config import load
from boost.errors import ConfigError


def test_invalid_results_are_refused(tmp_path: Path) -> None:
    other = '{"experiment": "b", "environment": {}}'
    for text, said in (("{", "not JSON"), ("[]", "not a result"), (other, "a result of 'b', not of 'toy'")):
        (tmp_path / "r.json").write_text(text)
        with pytest.raises(ConfigError, match=said):
            read(tmp_path / "r.json", "toy")
    with pytest.raises(ConfigError, match="No such file"):
        read(tmp_path / "none.json")


def test_objects_that_fit_and_lists_of_numbers_are_lines(tmp_path: Path) -> None:
    many, words = list(range(100)), {"a": ["{\n}"] * 4, "b": [], "none": None}
    numbers = {"rounds": many, "spread": {"low": 1, "high": [2, 3]}, "both": [many, words], "deep": {"x": {"y": many}}}
    write_numbers(tmp_path / "x.json", numbers)
    lines = (tmp_path / "x.json").read_text().splitlines()
    assert json.loads("\n".join(lines)) == numbers
    assert f' "rounds": {many},' in lines and ' "spread": {"low": 1, "high": [2, 3]},' in lines
    assert f"  {json.dumps(words)}" in lines and len(lines) == 13


@pytest.mark.parametrize(("key", "value"), [("cpu", "another"), ("cores", 640), ("gpus", ["H200"])])
def test_machines_are_not_mixed(key: str, value: object) -> None:
    facts = facts_of("toy", load("demo"))
    other = facts | {"environment": facts["environment"] | {key: value}}
    require_one_machine([facts, facts | {"environment": facts["environment"] | {"started": "later", "threads": 9}}])
    with pytest.raises(MeasurementError, match=f"different machines cannot be compared: {key}"):
        require_one_machine([facts, facts, other])
    assert machine(facts["environment"] | {"gpus": ["H200", "H200"]}) == "2 x H200"


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
    with pytest.raises(ConfigError, match=r"other settings: model.dim is 64 there and 128 here") as error:
        resumed({"settings": other}, {"runs": []}, out)
    assert "\n" not in str(error.value)
    assert list(differences({"a": {"b": 1}, "c": 2}, {"a": {"b": 1}})) == ["c is 2 there and null here"]
