"""Compares the speed of this checkout with that of another one, for example before and after a change:

    git worktree add ../before COMMIT
    python -m benchmarks versions ../before --store data/stdlib

For each configuration, every round runs `boost train` for STEPS steps in both checkouts, in alternating order. A run's time is the
median over its steps after the first WARM_UP. Losses must agree within a relative 1e-4. Writes benchmarks/versions.json.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

from benchmarks.commands import LEAST_ROUNDS, add_rounds, require_least
from benchmarks.experiments.contest import in_words, ratio
from benchmarks.experiments.results import Facts, MeasurementError, write_numbers
from boost.config import load
from boost.measure.steps import shape
from boost.train.progress import progress
from boost.train.rundir import environment

RESULT, ROOT = Path("benchmarks/versions.json"), Path(__file__).parents[2]
STEPS, WARM_UP = 12, 4
CONFIGS = {
    f"{name}, TP {tp}": [*words, f"--parallel.tp={tp}"]
    for name, words in (("demo", []), ("d 1024", shape(1024, 2, 2736, 16)))
    for tp in (1, 2)
}


def train(checkout: Path, words: Sequence[str], store: Path) -> tuple[float, list[float], Facts]:
    """(median seconds of a step, losses of all steps, git state). Raises MeasurementError if the run fails."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"--data.store={store.resolve()}", f"--run.dir={folder}/run", f"--train.steps={STEPS}"]
        command = [sys.executable, "-m", "boost.cli.main", "train", "demo", "--train.eval_every=0", *settings, *words]
        environ = os.environ | {"PYTHONPATH": str(checkout.resolve())}
        done = subprocess.run(command, cwd=checkout, env=environ, capture_output=True, text=True)
        if done.returncode:
            raise MeasurementError(f"boost train in '{checkout}' failed: {done.stderr[-300:]}")
        lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
        git = json.loads(Path(folder, "run", "environment.json").read_text())["git"]
    steps = [line for line in lines if "gradient_norm" in line]
    return median(line["seconds"] for line in steps[WARM_UP:]), [line["loss"] for line in steps], git


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("other", type=Path, metavar="OTHER", help="another checkout of this repository")
    parser.add_argument("--store", type=Path, default=Path("data/stdlib"), metavar="DIR", help="default data/stdlib")
    parser.add_argument("--out", type=Path, default=RESULT, metavar="PATH", help=f"default {RESULT}")
    add_rounds(parser, 9)


def run(args: argparse.Namespace) -> int:
    """Raises MeasurementError if a run fails, losses differ, or both checkouts are at the same commit."""
    require_least("--rounds", [args.rounds], LEAST_ROUNDS)
    both, configs, commits = {"now": ROOT, "before": args.other}, {}, {}
    for name, words in CONFIGS.items():
        seconds: dict[str, list[float]] = {version: [] for version in both}
        losses = {}
        for number in progress(range(args.rounds), name):
            for version in sorted(both, reverse=number % 2 == 1):
                taken, losses[version], commits[version] = train(both[version], words, args.store)
                seconds[version].append(taken)
            pairs = zip(losses["now"], losses["before"], strict=True)
            if commits["now"] == commits["before"] or not all(abs(a - b) <= 1e-4 * b for a, b in pairs):
                raise MeasurementError(f"{name}: both checkouts have one commit, or losses differ: {commits}, {losses}")
        speedup = ratio(seconds["before"], seconds["now"])
        configs[name] = {"seconds": seconds, "speedup": asdict(speedup)}
        print(f"{name}: {in_words(speedup)} times as fast as before", flush=True)
    whole = {
        "environment": environment(load("demo", [])),
        "commits": commits,
        "rounds": args.rounds,
        "configs": configs,
    }
    write_numbers(args.out, whole)
    return 0
