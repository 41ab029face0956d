"""The Python examples run and show what they claim."""

import contextlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed import run_distributed

EXAMPLES = Path(__file__).parents[2] / "examples"
LIMIT_S = 600
"""Only against hanging for ever."""

pytestmark = pytest.mark.slow


def run(*command: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}
    found = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, timeout=LIMIT_S)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def own_loop(out: str) -> tuple[list[float], list[float]]:
    """(losses, gradient norms) that it prints."""
    losses, norms = ([float(x) for x in re.findall(rf"{name} ([\d.]+)", out)] for name in ("loss", "gradient norm"))
    assert len(losses) == 3 and losses[-1] < losses[0] - 0.5
    return losses, norms


SCRIPT = str(EXAMPLES / "own_loop.py")
WORDS = ("--steps", "21", "--dim", "64", "--layout")


def in_a_pool() -> str:
    """What it prints, in a process that has a process group already."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setattr(sys, "argv", [SCRIPT, *WORDS, "btp-sp"])
        patch.setattr(dist, "init_process_group", lambda backend: None)
        patch.setattr(dist, "destroy_process_group", lambda: None)
        runpy.run_path(SCRIPT, run_name="__main__")
    return out.getvalue()


def test_own_loop() -> None:
    main, other = run_distributed(2, in_a_pool)
    own_loop(main)
    assert other == "", "one of them prints"


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["btp-sp", "btp"])
def test_own_loop_is_the_same_on_other_meshes(layout: str) -> None:
    """The same gradient norms on dp 2 x tp 2 as on two TP ranks, started by torchrun."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
    (_, two), (_, four) = (
        own_loop(run(*torchrun, size, SCRIPT, *WORDS, layout, "--dp", dp)) for size, dp in (("2", "1"), ("4", "2"))
    )
    assert two == pytest.approx(four, rel=0.01)


def test_lowrank_in_a_transformers_model(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "lowrank_transformers.py"), run_name="__main__")
    out = capsys.readouterr().out
    sizes, losses = re.findall(r"([\d.]+)M", out), [float(x) for x in re.findall(r"loss ([\d.]+)", out)]
    assert float(sizes[1]) < float(sizes[0]) and sizes[1] == sizes[2]
    assert losses[0] < losses[1] and losses[2] < losses[1], "factors cost something, and training heals it"


@pytest.mark.nightly
def test_the_notebook_runs_from_top_to_bottom(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPLBACKEND", "agg")
    cells = json.loads((EXAMPLES / "tour.ipynb").read_text(encoding="utf-8"))["cells"]
    names: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    out = capsys.readouterr().out
    assert names["losses"]["cola"][-1] < names["losses"]["cola"][0]
    stored = "".join(line for cell in cells for output in cell.get("outputs", ()) for line in output.get("text", ()))
    for text in (out, stored):
        assert "fastest configuration that fits" in text and "all-reduce" in text, "the plan, the collectives"
