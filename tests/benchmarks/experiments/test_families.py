"""Families side by side: budgets of equal tokens, FLOPs and time, and runs that are made once."""

import json
from pathlib import Path

import pytest

from benchmarks.commands import main
from tests import toy
from tests.cli.commands import Capture


@pytest.mark.slow
@pytest.mark.nightly
def test_an_interrupted_comparison_goes_on(tmp_path: Path, store: Path, capfd: Capture) -> None:
    (tmp_path / "run.toml").write_text(toy.TOML + "[train]\nseq_len = 32\nsteps = 4\n[parallel]\ntp = 1\n")
    words = (
        f"families {tmp_path}/run.toml --contenders dense svd:loro --orders 1 --rates 1e-3 --sweep-steps 2 --rounds 7 "
        f"--out {tmp_path}/out --data.store {store} --run.device cpu"
    ).split()
    assert main(words) == 0
    assert "| svd:loro | B A x |" in capfd.readouterr().out
    facts, made = (json.loads((tmp_path / f"out{suffix}").read_text()) for suffix in (".json", ".runs.json"))
    dense, loro = facts["rows"]
    assert dense["steps"] == {"tokens": 4, "flops": 4, "time": 4} and set(dense["losses"]["flops"]) < set(made.values())
    assert loro["steps"]["flops"] == round(4 * dense["flops_per_token"] / loro["flops_per_token"]) > 4
    # The same runs are not made again: another answer in the file is believed.
    (tmp_path / "out.runs.json").write_text(json.dumps(dict.fromkeys(made, 1.25)))
    assert main(words) == 0
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert all(row["losses"]["tokens"] == [1.25] for row in rows)
