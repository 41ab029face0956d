"""Dense against low-rank models at equal time, equal tokens and equal FLOPs, at 60M shapes on one GPU.

    python -m benchmarks.gpu.worth train cola data/worth --seconds 150     one family, for 150 seconds of training
    python -m benchmarks.gpu.worth compare benchmarks/gpu/results          a table of all runs in a folder

`worth.sh` runs both. All families see the same batches in the same order, with the same schedule: a warm-up, then a constant
learning rate, so that a loss read off at any time, number of tokens or number of FLOPs is comparable. Time is that of the
optimizer steps; evaluations, and the first steps, which compile, do not count.

Learning rates come from benchmarks/results/families-2026-11.json, where each family's best of four was found at width 192. The rule
for other widths is 1 / width, as for Adam in muP (arXiv 2203.03466). It was derived for dense hidden matrices, so it is a guess for
factors; `--rate-factor 2` and `0.5` test it.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

import boost
from boost.config import Config, load
from boost.config.architecture import flops_per_token, parameter_count
from boost.train.events import StepEnd
from boost.train.loop import Trainer
from boost.train.rundir import environment

FAMILIES = ("dense", "svd", "cola", "lax")
TUNED = Path(__file__).parents[1] / "results" / "families-2026-11.json"
COMPILES = 10
"""First steps, whose time does not count."""


def tuned_rate(family: str, width: int) -> float:
    """The best learning rate at the width of the sweep, times its width / `width`."""
    facts = json.loads(TUNED.read_text(encoding="utf-8"))
    sweep = [run for run in facts["sweep"] if run["contender"] == family]
    best = min(sweep, key=lambda run: run["loss"])
    return float(best["lr"]) * facts["config"]["model"]["dim"] / width


class ReadOff(boost.Hook):
    """Evaluates every `every` seconds of training, and stops the run after `seconds`."""

    def __init__(self, seconds: float, every: float, tokens: int) -> None:
        self.budget, self.every, self.eval_tokens = seconds, every, tokens
        self.seconds = 0.0
        self.points: list[dict[str, float]] = []

    def after_step(self, trainer: Trainer, event: StepEnd) -> None:
        if event.metrics.step > COMPILES:
            self.seconds += event.metrics.seconds
        is_over = (
            bool(self.points) and self.points[-1]["seconds"] >= self.budget
        )  # one more step follows a request to stop
        if is_over or self.seconds < min(self.every * (len(self.points) + 1), self.budget):
            return
        found = trainer.evaluate(self.eval_tokens)
        if found is None:
            return
        tokens = event.metrics.tokens
        flops = float(tokens) * trainer.flops_per_token
        self.points.append({"seconds": self.seconds, "tokens": tokens, "flops": flops, "heldout_loss": found.loss})
        if self.seconds >= self.budget:
            trainer.request_stop("its time is over")


def config_of(args: argparse.Namespace) -> Config:
    """The published shape of a family, on the store, with its tuned rate."""
    preset, family = ("llama-60m", []) if args.family == "dense" else ("cola-60m", [f"--model.family={args.family}"])
    fixed = {
        "data.store": args.store, "run.dir": f"{args.out / 'runs'}/{args.family}-{args.seed}", "run.device": args.device,
        "train.seed": args.seed, "train.steps": 1_000_000, "train.eval_every": 0, "train.save_every": 0, "train.save_minutes": 0,
        "optim.schedule": "constant", "optim.warmup_steps": 100, "optim.beta2": 0.95,
    }  # fmt: skip
    config = load(preset, [*family, *(f"--{key}={value}" for key, value in fixed.items()), *args.overrides])
    return config.changed(optim={"lr": args.rate_factor * tuned_rate(args.family, config.model.dim)})


def train(args: argparse.Namespace) -> int:
    config = config_of(args)
    readings = ReadOff(args.seconds, args.every, args.eval_tokens)
    boost.Trainer(config, hooks=[readings]).fit()
    result = {
        "family": args.family, "seed": args.seed, "seconds": args.seconds, "lr": config.optim.lr,
        "parameters": parameter_count(config.model), "flops_per_token": flops_per_token(config.model, config.train.seq_len),
        "environment": environment(config), "config": config.model_dump(), "points": readings.points,
    }  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"worth-{args.family}-{args.seed}.json").write_text(json.dumps(result) + "\n", encoding="utf-8")
    return 0


def read_off(run: dict[str, Any], key: str, at: float) -> float:
    """A run's held-out loss at a number of seconds, tokens or FLOPs, interpolated between evaluations."""
    points = run["points"]
    return float(np.interp(at, [point[key] for point in points], [point["heldout_loss"] for point in points]))


def compare(args: argparse.Namespace) -> int:
    """For each reading, the largest amount that all runs reached; the loss there, mean and spread over seeds."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(args.folder.glob("worth-*-*.json"))]
    losses: dict[str, dict[str, list[float]]] = {}
    for key in ("seconds", "tokens", "flops"):
        at = min(run["points"][-1][key] for run in runs)
        for run in runs:
            losses.setdefault(run["family"], {}).setdefault(key, []).append(read_off(run, key, at))
    (args.folder / "worth.json").write_text(json.dumps({"losses": losses, "runs": runs}) + "\n", encoding="utf-8")
    print("| model | equal time | equal tokens | equal FLOPs |\n|---|--:|--:|--:|")
    for family, found in losses.items():
        cells = [f"{np.mean(values):.4f} ± {np.std(values):.4f}" for values in found.values()]
        print(f"| {family} | {' | '.join(cells)} |")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("train")
    one.add_argument("family", choices=FAMILIES)
    one.add_argument("store", help="a token store")
    one.add_argument("--out", type=Path, default=Path("benchmarks/gpu/results"))
    one.add_argument("--seconds", type=float, default=150, help="seconds of training")
    one.add_argument("--every", type=float, default=20, help="seconds between evaluations")
    one.add_argument("--eval-tokens", type=int, default=500_000)
    one.add_argument("--seed", type=int, default=0, help="of the initialization and of the data order")
    one.add_argument("--rate-factor", type=float, default=1.0)
    one.add_argument("--device", default="cuda")
    one.set_defaults(run=train)
    both = commands.add_parser("compare")
    both.add_argument("folder", type=Path)
    both.set_defaults(run=compare)
    args, overrides = parser.parse_known_args()
    args.overrides = overrides
    return int(args.run(args))


if __name__ == "__main__":
    sys.exit(main())
