"""`boost bench` runs the benchmarks of a checkout; an installed package reports that it has none."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.commands import say

ROOT = Path(__file__).parents[2]


def test_words_are_passed_on_in_any_order(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = say(capsys, "bench", "--model.dim", "1000", "single", "--rounds", "7")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "model.heads = 8" in err and "nearest valid value: 10" in err


@pytest.mark.slow
def test_without_a_checkout_it_says_so_and_other_commands_work(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "boost", tmp_path / "boost", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "elsewhere" / "benchmarks").mkdir(parents=True)  # of another project

    def boost(*words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "boost.cli.main", *words],
            cwd=tmp_path / "elsewhere",
            env=os.environ | {"PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=600,
        )

    assert boost("--help").returncode == 0
    found = boost("bench", "steps", "--train.steps", "3")
    assert (found.returncode, found.stdout, found.stderr.count("\n")) == (2, "", 1)
    assert "needs a checkout" in found.stderr and "clone the BOOST repository" in found.stderr
    ignored = shutil.ignore_patterns("__pycache__", "results")
    shutil.copytree(ROOT / "benchmarks", tmp_path / "benchmarks", ignore=ignored)
    found = boost("bench", "fit", "--memory-gb", "0")
    assert found.returncode == 2 and "--memory-gb = 0 must be positive" in found.stderr
