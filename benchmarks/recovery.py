"""Soak test of in-step recovery: kills processes at random. `python -m benchmarks.recovery STORE FOLDER [--kills 50]`.

Trains a small model on four processes (dp 4, dp 2 x tp 2, and dp 4 with ZeRO-1; fp64 and fp32) with frequent evaluations and
saves; if the machine allows network namespaces, also with dp 4 across two of them. Sends SIGKILL to random processes at random
times: sometimes to two at once (except with ZeRO-1, because the two may hold both copies of a shard), sometimes to a replica that
is rejoining. At least one replica with weights always survives. Then checks that every step appears exactly once, that losses and
weights match those of an undisturbed run, and that no lock files remain.

Also measures useful tokens per process-second at several kill rates, with in-step recovery and with a restart from the latest
checkpoint, and the step time with and without recovery when nothing fails (interleaved runs). Skipped parts keep their earlier
results in recovery.json. Writes recovery.json and docs/pictures/recovery.svg.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from benchmarks.experiments.hosts import hosts, why_no_hosts
from benchmarks.killed_runs import BOOST, PROCESSES, Hosts, Run, lines
from boost.config import load
from boost.drawing import pyplot, write
from boost.train.checkpoint import WeightReader, complete_checkpoints, open_checkpoint
from boost.train.progress import progress
from boost.train.rundir import environment

RESULT = Path(__file__).parent / "recovery.json"
PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "recovery.svg"
TOKENS = 32 * 128
"""Tokens per step."""
MODEL = (
    "--model.vocab_size 4096 --model.dim 128 --model.ffn_dim 352 --model.layers 2 --model.heads 4 --model.kv_heads 4 "
)
MODEL += "--model.rank 32 --train.seq_len 128 --train.global_batch 32 --train.micro_batch 1 --train.log_every 50"
MESHES = {
    "dp 4": "--parallel.tp 1 --parallel.dp 4",
    "dp 2 x tp 2": "--parallel.tp 2 --parallel.dp 2 --train.global_batch 64",  # longer steps: one replica is killed at a time
    "dp 4, ZeRO-1": "--parallel.tp 1 --parallel.dp 4 --parallel.shard optimizer",
}
DTYPES = {
    "fp64": "--train.param_dtype float64 --train.compute_dtype float64",
    "fp32": "--train.param_dtype float32 --train.compute_dtype float32",
}
LIMITS = {"fp64": 1e-12, "fp32": 1e-6}
"""Maximum relative difference of any loss, and of the weights in norm."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path, help="a token store, such as data/stdlib")
    parser.add_argument("folder", type=Path, help="output folder; results of an earlier soak are deleted")
    parser.add_argument("--kills", type=int, default=50, metavar="N", help="kills per run (default 50)")
    parser.add_argument("--steps", type=int, default=150, metavar="N", help="steps per run (default 150)")
    parser.add_argument("--every", type=float, default=2.0, metavar="S", help="mean seconds between kills (default 2)")
    parser.add_argument(
        "--rates",
        type=float,
        nargs="+",
        default=[10.0, 5.0],
        metavar="S",
        help="mean seconds between kills when measuring useful tokens (default 10 and 5)",
    )
    parser.add_argument(
        "--turns", type=int, default=8, metavar="N", help="runs with recovery, and as many without (default 8)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed for kill times and victims (default 0)")
    parser.add_argument("--only", default="", metavar="TEXT", help="run only parts whose name contains TEXT")
    args = parser.parse_args()
    for mesh in MESHES:
        for dtype in DTYPES:
            name = f"{mesh}, {dtype}"
            if args.only in name:
                put("runs", name, soak(args, name, mesh, dtype))
    if args.only in HOSTS and not (why := why_no_hosts()):
        put("runs", HOSTS, soak_hosts(args))
    elif args.only in HOSTS:
        print(f"{HOSTS}: {why}")
    for rate in args.rates if args.only in "useful" else ():
        for recovery in RECOVERIES:
            put("useful", f"{recovery}, a kill every {rate:g} s", useful(args, recovery, rate))
    if args.only in "overhead":
        put("overhead", "dp 2, fp32", overhead(args))
    draw(known()["useful"])
    return 0


def known() -> dict[str, Any]:
    """Reads recovery.json."""
    found: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {}
    return {part: found.get(part, {}) for part in ("runs", "useful", "overhead")}


def put(part: str, name: str, found: dict[str, Any]) -> None:
    """Prints a result and writes it to recovery.json."""
    print(name, json.dumps({key: value for key, value in found.items() if key not in ("kills", "path")}), flush=True)
    result = known()
    result[part][name] = {"environment": environment(load("demo", [])), **found}
    RESULT.write_text(json.dumps(result) + "\n", encoding="utf-8")


def soak(args: argparse.Namespace, name: str, mesh: str, dtype: str) -> dict[str, Any]:
    """Trains twice, undisturbed and with kills, and compares the runs. Raises SystemExit if a check fails."""
    folder = args.folder / name.replace(" ", "").replace(",", "-")
    shutil.rmtree(folder, ignore_errors=True)
    words = f"{MODEL} {MESHES[mesh]} {DTYPES[dtype]} --run.recovery in-step"
    whole = Run(args, folder / "whole", words)
    whole.finish()
    killed = Run(args, folder / "killed", words)
    killed.spares_pairs = "ZeRO-1" in mesh
    kills = list(killed.disturb(random.Random(args.seed)))
    killed.finish()
    return {"held": compare(args, whole, killed, kills, LIMITS[dtype]), "kills": kills}


HOSTS = "two hosts, dp 4, fp64"


def soak_hosts(args: argparse.Namespace) -> dict[str, Any]:
    """Same as `soak`, on two hosts with two replicas each: `boost coordinate`, and one torchrun per replica, which restarts it."""
    folder = args.folder / "two-hosts"
    shutil.rmtree(folder, ignore_errors=True)
    words = f"{MODEL} {MESHES['dp 4']} {DTYPES['fp64']} --run.recovery in-step"
    whole = Run(args, folder / "whole", words)
    whole.finish()
    with hosts(2) as (first, second):
        killed = Hosts(args, folder / "killed", words, (first, second))
        try:
            kills = list(killed.disturb(random.Random(args.seed)))
            killed.finish()
        finally:
            killed.end()
    return {"held": compare(args, whole, killed, kills, LIMITS["fp64"]), "kills": kills}


def overhead(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds per step on two processes with and without in-step recovery, from runs interleaved in alternating order."""
    found: dict[str, list[float]] = {"restart": [], "in-step": []}
    for turn in progress(range(args.turns), "runs with and without recovery"):
        for recovery in sorted(found, reverse=bool(turn % 2)):
            folder = args.folder / f"overhead-{recovery}"
            shutil.rmtree(folder, ignore_errors=True)
            words = f"{MODEL} --parallel.tp 1 --parallel.dp 2 {DTYPES['fp32']} --run.recovery {recovery}"
            words = f"{words} --run.dir {folder} --data.store {args.store} --train.steps 100"
            subprocess.run([*BOOST, "train", "demo", *words.split()], check=True, capture_output=True)
            seconds = [line["seconds"] for line in lines(folder, "step")[20:]]
            found[recovery].append(round(1e3 * statistics.median(seconds), 3))
    ratios = [a / b for a, b in zip(found["in-step"], found["restart"], strict=True)]
    return {"ms": found, "ratio_median": statistics.median(ratios), "ratios": [round(ratio, 4) for ratio in ratios]}


RECOVERIES = {"in-step": "in-step recovery", "restart": "restart from the latest checkpoint"}
"""Labels in the figure by `run.recovery`."""


def useful(args: argparse.Namespace, recovery: str, rate: float) -> dict[str, Any]:
    """Trains to the last step while killing a process every `rate` seconds on average. Returns progress over time and useful
    tokens per process-second."""
    folder = args.folder / f"useful-{recovery}"
    shutil.rmtree(folder, ignore_errors=True)
    chance, began = random.Random(args.seed), time.monotonic()
    words = (
        f"{MODEL} {MESHES['dp 4']} {DTYPES['fp32']} --run.recovery {recovery} --resume auto --run.dir {folder / 'run'}"
    )
    run, next_kill = Run(args, folder / "run", words), chance.expovariate(1 / rate)
    kills, path = list[float](), list[tuple[float, int, float]]()
    while not (run.over and run.process.returncode == 0):
        time.sleep(0.1)
        now = time.monotonic() - began
        if run.process.poll():  # only with "restart": with in-step recovery, one replica always survives
            run.process.communicate()
            run = Run(args, folder / "run", words)
        if now >= next_kill and (beats := run.workers()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(chance.choice(beats).pid, signal.SIGKILL)
            kills.append(round(now, 2))
            next_kill = now + chance.expovariate(1 / rate)
        done = lines(folder / "run", "step")
        if done and (not path or path[-1][1] != done[-1]["step"]):
            path.append((round(now, 2), done[-1]["step"], done[-1]["loss"]))
    run.process.communicate()
    seconds = path[-1][0]
    tokens = args.steps * TOKENS
    return {
        "recovery": recovery, "rate_s": rate, "kills": kills, "path": path, "seconds": seconds,
        "tokens_per_process_second": tokens / seconds / PROCESSES,
    }  # fmt: skip


def draw(found: dict[str, Any]) -> None:
    """Plots completed steps and loss over time at each kill rate, with kills marked."""
    colors = {"in-step": "#0b6e4f", "restart": "#b23a48"}
    rates = sorted({run["rate_s"] for run in found.values()}, reverse=True)
    figure, axes = pyplot().subplots(
        2, len(rates), figsize=(5.2 * len(rates), 5.5), sharex="col", layout="constrained", squeeze=False
    )
    for run in found.values():
        steps, loss = axes[:, rates.index(run["rate_s"])]
        color = colors[run["recovery"]]
        at, done, losses = zip(*run["path"], strict=True)
        speed = f"{run['tokens_per_process_second']:,.0f} useful tokens per process-second"
        steps.plot(at, done, color=color, label=f"{RECOVERIES[run['recovery']]}\n{speed}")
        loss.plot(at, losses, color=color, linewidth=0.8)
        heights = [max([step for when, step, _ in run["path"] if when <= kill], default=0) for kill in run["kills"]]
        steps.plot(run["kills"], heights, "x", color=color)
        steps.set_title(f"one process killed (x) every {run['rate_s']:g} s on average", fontsize=10)
        steps.legend(loc="lower right", frameon=False, fontsize=8)
        loss.set_xlabel("seconds")
    axes[0, 0].set_ylabel("completed steps")
    axes[1, 0].set_ylabel("loss, nats per token")
    write(figure, PICTURE)


def compare(
    args: argparse.Namespace, whole: Run, killed: Run | Hosts, kills: list[dict[str, Any]], limit: float
) -> dict[str, Any]:
    """Checks the invariants and summarizes the soak. Raises SystemExit if one is violated."""
    expected, actual = (lines(run.folder, "step") for run in (whole, killed))
    if [line["step"] for line in actual] != list(range(1, args.steps + 1)):
        raise SystemExit(f"recovery: {killed.folder}/metrics.jsonl does not have every step exactly once")
    losses = max(abs(a["loss"] / b["loss"] - 1) for a, b in zip(actual, expected, strict=True))
    weights = difference(whole.folder, killed.folder)
    changes, replicas = lines(killed.folder, "membership"), None
    for change in changes:
        replicas = (replicas or change["of"]) + len(change["joined"]) - len(change["lost"])
        if replicas != change["replicas"]:
            raise SystemExit(f"recovery: {killed.folder} does not record every change of its replicas")
    lost = [each for each in changes if each["lost"]]
    if (count := sum(len(each["victims"]) for each in kills)) < args.kills:
        raise SystemExit(f"recovery: {killed.folder} ended after {count} of {args.kills} kills; increase --steps")
    held = {
        "kills": count,
        "moments": dict(Counter(victim.partition(":")[0] for each in kills for victim in each["victims"])),
        "replicas_lost": sum(len(each["lost"]) for each in changes),
        "replicas_back": sum(len(each["joined"]) for each in changes),
        "seconds_to_go_on_median": statistics.median(each["seconds"] for each in lost) if lost else None,
        "seconds_to_go_on_most": max((each["seconds"] for each in lost), default=None),
        "largest_difference_of_a_loss": losses,
        "difference_of_weights": weights,
        "seconds": round(killed.seconds, 1),
        "seconds_undisturbed": round(whole.seconds, 1),
    }
    if max(losses, weights) > limit:
        raise SystemExit(f"recovery: {killed.folder} differs from the undisturbed run: {json.dumps(held, indent=2)}")
    leftovers = [path.name for path in killed.folder.glob("*.lock")]
    if leftovers:
        raise SystemExit(f"recovery: leftover files: {leftovers}")
    return held


def difference(one: Path, other: Path) -> float:
    """Norm of the difference of the final weights, relative to the norm of the weights."""
    squares, whole = 0.0, 0.0
    a, b = (WeightReader(open_checkpoint(complete_checkpoints(run / "checkpoints")[-1])) for run in (one, other))
    for name in a.names():
        x, y = (found.read(name).double() for found in (a, b))
        squares += float((x - y).square().sum())
        whole += float(x.square().sum())
    return (squares / whole) ** 0.5


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
