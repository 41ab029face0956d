"""Families side by side: held-out loss at equal tokens, at equal FLOPs and at equal time.

A contender is a registered family, or FAMILY:OPTIMIZER; families of installed plugins, too. All have the sizes of CONFIG, the same
tokens in the same orders, and each the best of --rates in a short sweep. Equal FLOPs and equal time are the first contender's in
train.steps steps; other contenders then take more or fewer steps, on a schedule of that length. Every run is kept in PATH.runs.json
when it ends, so the same command goes on after an interruption.
"""

import argparse
import hashlib
import json
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

import boost
from benchmarks.commands import LEAST_ROUNDS, add_config, add_rounds, require_least, result_of
from benchmarks.experiments.contest import spread, take_turns
from benchmarks.experiments.peers import of_family
from benchmarks.experiments.results import Facts, Section, Table, facts_of
from benchmarks.experiments.sections import save
from boost.config import Config, load
from boost.config.architecture import flops_per_token, parameter_count
from boost.config.layouts import layouts_of
from boost.config.load import from_tree
from boost.files import replace_text
from boost.measure.steps import Stepper, look_at
from boost.parallel.mesh import Mesh
from boost.plan.inspection import inspect
from boost.train.rendezvous import choose_device

USUAL = ("dense", "svd", "svd:loro", "cola", "lax")
SWEEP_SEED = 1000
"""Of the sweep's order of data, which no other run uses."""
TP = 4
"""TP ranks at which bytes per token are counted."""


def contender(config: Config, name: str) -> Config:
    """CONFIG in a family and with an optimizer. Raises ConfigError."""
    family, _, optimizer = name.partition(":")
    made = of_family(config, family)
    tree = made.model_dump()
    return from_tree(tree | {"optim": {"name": optimizer}}) if optimizer else made


def trained(config: Config) -> float:
    """Held-out loss after a run of `config`."""
    with tempfile.TemporaryDirectory(prefix="boost-families-") as folder:
        result = boost.Trainer(config.changed(run={"dir": folder})).fit()
    assert result.evaluation is not None, "the run was stopped"
    return result.evaluation.loss


class Runs:
    """Held-out losses by configuration, in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.losses: dict[str, float] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def loss(self, name: str, config: Config, steps: int, seed: int, rate: float) -> float:
        """Of one run, which is made unless it is in the file."""
        one = config.changed(train={"steps": steps}, optim={"lr": rate}, run={"seed": seed})
        parts = {part: getattr(one, part).model_dump() for part in ("model", "data", "train", "optim")}
        key = hashlib.sha256(json.dumps([parts, seed], sort_keys=True, default=str).encode()).hexdigest()[:16]
        if key not in self.losses:
            self.losses[key] = result_of(trained, (one,), 1)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(self.path, json.dumps(self.losses, indent=1) + "\n")
        print(f"{name}: {steps} steps, seed {seed}, lr {rate:g}: {self.losses[key]:.4f}", flush=True)
        return self.losses[key]


def timed(configs: dict[str, Config], rounds: int) -> Facts:
    """Step times of all contenders, interleaved, and their memory."""
    mesh = Mesh(choose_device(next(iter(configs.values())).run.device))
    steppers = {name: Stepper(config, mesh) for name, config in configs.items()}
    for stepper in steppers.values():
        stepper.step()
    peaks = {name: int(look_at(stepper).peak_bytes) for name, stepper in steppers.items()}
    turns = take_turns({name: stepper.step for name, stepper in steppers.items()}, mesh, rounds, words="families")
    return {"seconds": turns.seconds, "peak_bytes": peaks}


def measure(config: Config, args: argparse.Namespace) -> Iterator[Facts]:
    """A row for each contender."""
    configs = {name: contender(config, name) for name in args.contenders}
    across = {name: {"tp": TP, "layout": layouts_of(each.model)[0]} for name, each in configs.items()}
    sent = {
        name: inspect(from_tree(each.model_dump() | {"parallel": across[name]})).bytes_per_token
        for name, each in configs.items()
    }
    runs, times = Runs(args.out.with_suffix(".runs.json")), result_of(timed, (configs, args.rounds), 1)
    flops = {name: flops_per_token(each.model, each.train.seq_len) for name, each in configs.items()}
    steps, first, seeds = config.train.steps, args.contenders[0], range(args.orders)
    median = {name: spread(times["seconds"][name]).median for name in configs}
    for name, each in configs.items():
        swept = {rate: runs.loss(name, each, args.sweep_steps, SWEEP_SEED, rate) for rate in args.rates}
        best = min(swept, key=lambda rate: swept[rate])
        budgets = {
            "tokens": steps,
            "flops": round(steps * flops[first] / flops[name]),
            "time": round(steps * median[first] / median[name]),
        }
        yield {
            "name": name,
            "equation": each.model.equation,
            "parameters": parameter_count(each.model),
            "flops_per_token": flops[name],
            "seconds": times["seconds"][name],
            "peak_bytes": times["peak_bytes"][name],
            "bytes_per_token": sent[name],
            "swept": {str(rate): loss for rate, loss in swept.items()},
            "lr": best,
            "at_edge": best in (min(args.rates), max(args.rates)),
            "steps": budgets,
            "losses": {what: [runs.loss(name, each, n, seed, best) for seed in seeds] for what, n in budgets.items()},
        }


def arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser, "families", tp=False)
    parser.add_argument(
        "--contenders", nargs="+", default=list(USUAL), metavar="NAME", help="FAMILY or FAMILY:OPTIMIZER"
    )
    parser.add_argument("--orders", type=int, default=2, metavar="N", help="orders of the data (default 2)")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 3e-3, 1e-2, 3e-2], metavar="LR", help="swept")
    parser.add_argument("--sweep-steps", type=int, default=150, metavar="N", help="steps per rate (default 150)")
    add_rounds(parser, 15)


def run(args: argparse.Namespace) -> int:
    require_least("--rounds", [args.rounds], LEAST_ROUNDS)
    require_least("--orders", [args.orders])
    config = load(args.config, args.overrides)
    rows = list(measure(config, args))
    save(args.out, facts_of("families", config, rows=rows, orders=args.orders, rates=args.rates, tp=TP))
    return 0


def section(facts: Facts) -> Section:
    """The section of a result."""
    train, model, rows = facts["config"]["train"], facts["config"]["model"], facts["rows"]
    tokens = train["steps"] * train["global_batch"] * train["seq_len"]
    first = rows[0]

    def loss(row: Facts, what: str) -> str:
        own = row["losses"][what]
        apart = f" ± {(max(own) - min(own)) / 2:.4f}" if len(own) > 1 else ""
        return f"{statistics.fmean(own):.4f}{apart} ({row['steps'][what]} steps)"

    def cells(row: Facts) -> tuple[str, ...]:
        size = f"{row['parameters'] / 1e6:.2f} ({row['parameters'] / first['parameters']:.0%})"
        work = f"{row['flops_per_token'] / 1e6:.2f} ({row['flops_per_token'] / first['flops_per_token']:.0%})"
        ms = f"{1e3 * spread(row['seconds']).median:.0f}"
        memory = f"{row['peak_bytes'] / 1e6:.0f}", f"{row['bytes_per_token'] / 1e3:.1f}"
        rate = f"{row['lr']:g}{'*' if row['at_edge'] else ''}"
        return row["name"], row["equation"], size, work, ms, *memory, rate, *(loss(row, what) for what in row["steps"])

    about = (
        f"Width {model['dim']}, MLP {model['ffn_dim']}, {model['layers']} blocks, vocabulary {model['vocab_size']}; "
        f"{tokens / 1e6:.2f}M tokens in {train['steps']} steps; {facts['orders']} orders of the data. lr: the best of "
        f"{', '.join(f'{rate:g}' for rate in facts['rates'])} in a sweep with an order of its own (* at its edge)."
    )
    caption = (
        "Measured. Loss in nats per token on all held-out text: mean and half the range over orders. ms per step: median of "
        "interleaved rounds. Memory: peak of one process, MB. Sent: kB per token and process with the default layout at "
        f"TP {facts['tp']}, computed."
    )
    headings = ("model", "linear", "parameters, M:", "FLOPs per token, M:", "ms:", "memory:", "sent:", "lr:")
    losses = tuple(f"loss at equal {what}:" for what in ("tokens", "FLOPs", "time"))
    return Section("Families side by side", (about, Table(caption, (*headings, *losses), tuple(map(cells, rows)))))
