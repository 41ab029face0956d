"""Result files: environment, reading, and refusal to mix machines."""

import json
from pathlib import Path

import pytest

from benchmarks.experiments.document import Figure, Section, Table
from benchmarks.experiments.results import facts_of, machine, origin, read, require_one_machine, save_section
from boost.config import load
from boost.errors import ConfigError, MeasurementError


def test_a_section_is_written_with_its_command_and_machine(tmp_path: Path) -> None:
    facts = facts_of("toy", load("demo"), rows=[1])
    drawn: list[Path] = []
    section = Section(
        "Toys",
        (
            "Some words.",
            Table("All of them.", ("toy", "price:"), (("bear", "3"),)),
            Figure("toy-cost", "Cost", drawn.append),
        ),
    )
    save_section(tmp_path / "out" / "toy", facts, section)
    text = (tmp_path / "out" / "toy.md").read_text()
    assert text.startswith("# Toys\n") and " ".join(facts["environment"]["command"]) in text
    assert origin(facts["environment"]) in text and "thread(s)" in text
    assert "| toy | price |\n|---|--:|\n| bear | 3 |" in text and "![Cost](toy-cost.svg)" in text
    assert drawn == [tmp_path / "out" / "toy-cost.svg"]
    assert read(tmp_path / "out" / "toy.json", "toy") == json.loads(json.dumps(facts))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[]", "not a result"),
        ('{"experiment": "b", "environment": {}}', "a result of 'b', not of 'toy'"),
    ],
)
def test_invalid_results_are_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read(path, "toy")
    with pytest.raises(ConfigError, match="No such file"):
        read(tmp_path / "none.json")


@pytest.mark.parametrize(("key", "value"), [("cpu", "another"), ("cores", 640), ("gpus", ["H200"])])
def test_machines_are_not_mixed(key: str, value: object) -> None:
    facts = facts_of("toy", load("demo"))
    other = facts | {"environment": facts["environment"] | {key: value}}
    require_one_machine([facts, facts | {"environment": facts["environment"] | {"started": "later", "threads": 9}}])
    with pytest.raises(MeasurementError, match=f"different machines cannot be compared: {key}"):
        require_one_machine([facts, facts, other])
    assert machine(facts["environment"] | {"gpus": ["H200", "H200"]}) == "2 x H200"
