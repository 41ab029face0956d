"""`python -m benchmarks` reports invalid arguments before it starts any process."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.commands import EXPERIMENTS, main

ROOT = Path(__file__).parents[2]

BAD = [
    (["curves", "--tp", "1"], ["--tp = 1", "smallest valid value: 2"]),
    (["recompute", "--tp", "0"], ["--tp = 0", "smallest valid value: 1"]),
    (["recompute", "--rounds", "6"], ["--rounds = 6", "smallest valid value: 7"]),
    (["recompute", "--batches", "4", "-1"], ["--batches = -1", "smallest valid value: 1"]),
    (["recompute", "--tp", "3"], ["parallel.tp = 3", "nearest valid value"]),
    (["fit", "--memory-gb", "0"], ["--memory-gb = 0", "80"]),
    (["fit", "--train.step", "3"], ["train.step", "did you mean"]),
    (["modeled", "--hardware", "h10"], ["'h10'", "did you mean 'h100-"]),
    (["report", "--results", "/nowhere"], ["--results = '/nowhere'", "contains no results"]),
    (["steps", "--rounds", "6"], ["--rounds = 6", "smallest valid value: 7"]),
    (["steps", "--tp", "0"], ["--tp = 0", "smallest valid value: 1"]),
    (["steps", "--run.device", "cpu", "--hardware", "h100-80g"], ["--hardware = 'h100-80g'", "boost plan calibrate"]),
    (["steps", "--run.device", "cpu", "--tp", "3"], ["parallel.tp = 3", "nearest valid value"]),
    (["steps", "--train.step", "3"], ["train.step", "did you mean"]),
    (["parts", "--rounds", "1"], ["--rounds = 1", "smallest valid value: 7"]),
    (["parts", "--tp", "1"], ["--tp = 1", "smallest valid value: 2"]),
    (["parts", "--run.device", "cpu", "--shares", "4"], ["--shares = 4", "boost plan calibrate"]),
    (["families", "--contenders", "dense", "colla"], ["--contenders", "'colla'", "cola, lax"]),
    (["families", "--contenders", "cola", "cola"], ["--contenders", "'cola'", "duplicate"]),
    (["families", "--seeds", "1", "1"], ["--seeds = 1 1", "name each once"]),
    (["families", "--seeds", "-1"], ["--seeds = -1", "smallest valid value: 0"]),
    (["families", "--rounds", "3"], ["--rounds = 3", "smallest valid value: 7"]),
    (["families", "--jobs", "0"], ["--jobs = 0", "smallest valid value: 1"]),
    (["families", "--sweep-steps", "-5"], ["--sweep-steps = -5", "smallest valid value: 1"]),
    (["families", "--seeds", "7", "--sweep-seed", "7"], ["--sweep-seed = 7", "--seeds", "use a different one"]),
    (["families", "--sweep", "1e-3", "0"], ["--sweep = 0.001 0", "distinct and positive"]),
    (["gemms", "--rounds", "3"], ["--rounds = 3", "smallest valid value: 7"]),
    (["gemms", "--tps", "4", "4"], ["--tps = 4 4", "name each once"]),
    (["gemms", "--tps", "2", "3", "--run.device", "cpu"], ["parallel.tp = 3", "nearest valid value"]),
    (["gemms", "llama-350m"], ["model.family = 'dense'", "take cola"]),
    (["traffic", "--tp", "1"], ["--tp = 1", "smallest valid value: 2"]),
    (["grouping", "--batches", "0"], ["--batches = 0", "smallest valid value: 1"]),
    (["grouping", "--batches", "4", "4"], ["--batches = 4 4", "name each once"]),
    (["norms", "--rounds", "1"], ["--rounds = 1", "smallest valid value: 7"]),
    (["norms", "--tp", "3", "--run.device", "cpu"], ["parallel.tp = 3", "nearest valid value"]),
    (["families", "--contenders", "cola", "--data.store", "/nowhere"], ["/nowhere", "no token store"]),
    (["perplexity", "--tp", "1"], ["--tp = 1", "smallest valid value: 2"]),
    (["perplexity", "--seeds", "3"], ["--seeds = 3", "two distinct seeds"]),
    (["perplexity", "--seeds", "0", "1", "1"], ["--seeds = 0 1 1", "two distinct seeds"]),
    (["perplexity", "--tp", "3"], ["parallel.tp = 3", "nearest valid value"]),
    (["compare", "none.json", "other.json"], ["none.json", "No such file", "expected a result"]),
    (["single", "--rounds", "6"], ["--rounds = 6", "smallest valid value: 7"]),
    (["single", "--model.dim", "1000"], ["model.heads = 8", "nearest valid value: 10"]),
    (["ideal", "--tp", "1"], ["--tp = 1", "smallest valid value: 2"]),
    (["ideal", "--rounds", "3"], ["--rounds = 3", "smallest valid value: 7"]),
    (["ideal", "demo", "--tp", "3"], ["= 3", "nearest valid value"]),
    (["ideal", "demo", "--model.family", "dense", "--parallel.layout", "megatron"], ["model.family = 'dense'", "cola, svd or lax"]),
]  # fmt: skip


@pytest.mark.parametrize(("words", "said"), BAD, ids=[" ".join(words) for words, _ in BAD])
def test_a_mistake_is_one_line(words: list[str], said: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert all(word in err for word in said), err


def test_an_unknown_experiment(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["no-such"])
    assert left.value.code == 2
    assert "invalid choice: 'no-such'" in capsys.readouterr().err


def test_without_words_the_experiments_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if re.match(r" {4}\w", line)]
    assert listed == list(EXPERIMENTS)


@pytest.mark.slow
@pytest.mark.parametrize("command", [["benchmarks", "fit"], ["benchmarks.fit"]])
def test_both_ways_to_start_an_experiment(command: list[str]) -> None:
    found = subprocess.run(
        [sys.executable, "-m", *command, "--memory-gb", "0"], capture_output=True, text=True, cwd=ROOT, timeout=600
    )
    assert found.returncode == 2
    assert "--memory-gb = 0 must be positive" in found.stderr


@pytest.mark.parametrize(
    "experiment",
    [name for name in EXPERIMENTS if name not in ("ladder", "breakdown", "modeled", "evaluation", "report", "compare")],
)
def test_help_of_every_experiment(experiment: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([experiment, "--help"])
    assert left.value.code == 0
    out = capsys.readouterr().out
    assert f"python -m benchmarks {experiment}" in out and "--section.key" in out
