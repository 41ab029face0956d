"""`boost plan validate`: the verdict table, JSON, exit codes."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from boost.cli import plan_validate
from boost.errors import ConfigError
from boost.measure import validate


@pytest.fixture(scope="module")
def published() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validate, "MICRO_BATCHES", (1,))
        return validate.published_facts()


def run(words: list[str], published: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(validate, "published_facts", lambda: published)
    parser = argparse.ArgumentParser()
    plan_validate.add_parser(parser.add_subparsers())
    return plan_validate.run(parser.parse_args(["validate", *words]))


def test_the_verdicts(
    published: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["--out", str(tmp_path / "none")], published, monkeypatch) == 0
    out = capsys.readouterr().out
    assert "speed-up of BOOST" in out
    assert "holds" in out
    assert "No GPU was available" in out


def test_json_has_every_number(
    published: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["--json", "--out", str(tmp_path / "none")], published, monkeypatch) == 0
    facts = json.loads(capsys.readouterr().out)
    ratios = [each for each in facts["published"]["compared"] if each["table"] == "speed-up of BOOST"]
    assert len(ratios) == 10
    assert all(abs(each["off"]) <= 0.15 for each in ratios)


def test_what_is_too_far_off_ends_with_1(
    published: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = published | {"compared": [each | {"off": 0.3} for each in published["compared"]]}
    assert run(["--out", str(tmp_path / "none")], wrong, monkeypatch) == 1
    assert "does not hold" in capsys.readouterr().out


def test_a_profile_without_a_measurement(published: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="used only with --measure"):
        run(["--hardware", "local.toml"], published, monkeypatch)
