"""Two stores in one run, from training to `boost generate`, as commands."""

import json
import shlex
from pathlib import Path

import pytest

from boost.train.metrics import read_metrics
from tests.cli.commands import Capture, done
from tests.train.commands import toml

SIZES = {"steps": 6, "save_every": 3, "eval_every": 3, "log_every": 1}


def test_a_mixture_is_trained_resumed_and_evaluated(mixture: dict[str, float], tmp_path: Path, capsys: Capture) -> None:
    names = [Path(path).name for path in mixture]
    table = "{ " + ", ".join(f'"{path}" = {weight}' for path, weight in mixture.items()) + " }"
    run = tmp_path / "a run"
    config = toml(Path("unused"), tp=1, **SIZES).replace('store = "unused"', f"mixture = {table}")
    (file := tmp_path / "run.toml").write_text(f'{config}dir = "{run}"\n')
    out = done(capsys, "train", file)
    assert "70.0% store: " in out and "30.0% other: " in out
    lines = [line for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "eval"]
    for line in lines:
        losses = line["heldout_losses"]
        assert line["heldout_loss"] == pytest.approx(0.7 * losses["store"] + 0.3 * losses["other"], rel=1e-12)
        assert f"(store {losses['store']:.4f}  other {losses['other']:.4f})" in out
    out = done(capsys, "eval", run, "--json")
    assert json.loads(out)["losses"] == pytest.approx(lines[-1]["heldout_losses"], rel=1e-6)
    out = done(capsys, "eval", run)
    assert all(f"loss on {name}" in out for name in names)
    export, tasks = map(shlex.split, out.splitlines()[-1].removeprefix("on tasks: ").split(" && "))
    assert export == ["boost", "export", str(run), "--out", "exported/a run"]
    assert tasks[tasks.index("--model_args") + 1] == "pretrained=exported/a run,trust_remote_code=True"
    done(capsys, "generate", run, "--prompt", "why", "--max-tokens", "5", "--json")
    done(capsys, "train", file, "--resume", "auto", "--train.steps", "8")
    begun = tmp_path / "begun"
    words = ("--start-from", run, "--run.dir", begun, "--train.steps", "2")
    assert f"initialized from the weights of {run}" in done(capsys, "train", file, *words)
