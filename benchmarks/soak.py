"""Soak test of restarts: kills and resumes one run many times. `python -m benchmarks.soak STORE FOLDER [--kills 200]`.

Trains the demo on two processes, with frequent checkpoints and occasional evaluations. Each round resumes the run and, at a random
time, sends SIGKILL (sometimes SIGTERM, which asks the run to save and stop) to one worker, to the launcher, or to all processes at
once. The last round trains to the end. Then checks that metrics.jsonl has every step exactly once, that all losses match those of
an undisturbed run, that no lock or temporary folder remains, and that every checkpoint verifies. Writes soak.json.

Goodput is the total time of the steps in metrics.jsonl divided by wall-clock time, which includes startup, repeated steps, saves
and evaluations.
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
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.experiments.results import write_numbers
from benchmarks.killed_runs import BOOST, lines
from boost.train.checkpoint import complete_checkpoints
from boost.train.heartbeat import read_beats
from boost.train.progress import progress

RESULT = Path(__file__).parent / "soak.json"
WARNED = ("damaged", "set aside", "incomplete", "taking over")
"""Words that appear in warnings about damage from a kill."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path, help="a token store, such as data/stdlib")
    parser.add_argument("folder", type=Path, help="output folder; results of an earlier soak are deleted")
    parser.add_argument("--kills", type=int, default=200, metavar="N", help="number of kills (default 200)")
    parser.add_argument("--steps", type=int, default=2000, metavar="N", help="training steps (default 2000)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed for kill times and victims (default 0)")
    parser.add_argument(
        "--longest", type=float, default=8.0, metavar="S", help="maximum seconds before a kill (default 8)"
    )
    args = parser.parse_args()
    whole, killed = args.folder / "whole", args.folder / "killed"
    for run in (whole, killed):
        shutil.rmtree(run, ignore_errors=True)
    began = time.monotonic()
    finish(start(args, whole))
    whole_s = time.monotonic() - began
    began = time.monotonic()
    rounds = soak(args, killed)
    finish(start(args, killed))
    killed_s = time.monotonic() - began
    result = report(args, whole, killed, rounds) | {"seconds_undisturbed": whole_s, "seconds_with_kills": killed_s}
    result["goodput"] = step_seconds(killed) / killed_s
    result["goodput_undisturbed"] = step_seconds(whole) / whole_s
    write_numbers(RESULT, result)
    print(json.dumps(result, indent=2))
    return 0


def start(args: argparse.Namespace, run: Path) -> "subprocess.Popen[str]":
    """Starts the run, or resumes it from its latest checkpoint."""
    words = f"train demo --resume auto --run.dir {run} --data.store {args.store} --train.steps {args.steps} --train.log_every 1"
    words += " --train.seq_len 128 --train.save_every 3 --train.keep 3 --train.eval_every 50 --train.eval_tokens 4096"
    return subprocess.Popen(
        [*BOOST, *words.split()], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def finish(process: "subprocess.Popen[str]") -> None:
    out, err = process.communicate()
    if process.returncode:
        raise SystemExit(f"soak: an undisturbed run exited with code {process.returncode}:\n{out}\n{err}")


def soak(args: argparse.Namespace, run: Path) -> list[dict[str, Any]]:
    """Kills the run repeatedly. Returns each kill's time, victim, signal and phase, and the steps reached and saved."""
    chance = random.Random(args.seed)
    rounds: list[dict[str, Any]] = []
    for _ in progress(range(args.kills), "kills"):
        rounds.append(one_round(args, run, chance, 0.5 + chance.random() * (args.longest - 0.5)))
        if last_step(run) == args.steps:
            break
    return rounds


def one_round(args: argparse.Namespace, run: Path, chance: random.Random, after_s: float) -> dict[str, Any]:
    """Resumes the run and kills it."""
    before = last_saved(run)
    process = start(args, run)
    time.sleep(after_s)
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True)
    workers = [int(pid) for pid in children.stdout.split()]
    victim = chance.choice(["launcher", "one", "one", "all"])
    number = chance.choice([signal.SIGKILL] * 5 + [signal.SIGTERM])
    phase = phases()
    if victim == "one" and workers:
        send(chance.choice(workers), number)
    elif victim == "all" and number == signal.SIGKILL:
        os.killpg(process.pid, number)
    else:
        victim = "launcher"
        send(process.pid, number)
    begin = time.monotonic()
    out, err = process.communicate()
    ended_s = time.monotonic() - begin
    for pid in workers:  # orphaned workers of a killed launcher save or exit on their own
        while Path(f"/proc/{pid}/cmdline").exists() and b"boost" in Path(f"/proc/{pid}/cmdline").read_bytes():
            time.sleep(0.05)
    if "Traceback" in out + err:
        raise SystemExit(f"soak: the run printed a traceback:\n{out}\n{err}")
    if process.returncode not in (0, 3, -number, 128 + number):
        raise SystemExit(f"soak: unexpected exit code {process.returncode}:\n{out}\n{err}")
    saved = last_saved(run)
    if saved < before:
        raise SystemExit(f"soak: the checkpoint for step {before} was lost")
    return {
        "after_s": round(after_s, 2),
        "victim": victim,
        "signal": signal.Signals(number).name,
        "phase": phase,
        "exit_code": process.returncode,
        "ended_s": round(ended_s, 2),
        "saved": saved,
        "reached": last_step(run),
        "warnings": [line for line in (out + err).splitlines() if any(word in line for word in WARNED)],
    }


def send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def phases() -> str:
    """The phase that the first process of the newest launch reports."""
    folders = sorted(Path(tempfile.gettempdir()).glob("boost-launch-*"), key=lambda path: path.stat().st_mtime)
    beats = read_beats(folders[-1]) if folders else []
    if not beats:
        return "before the first beat"
    return f"{beats[0].phase}{', saving' if beats[0].saving and beats[0].phase != 'save' else ''}"


def last_step(run: Path) -> int:
    return max([0, *(line["step"] for line in lines(run, "step"))])


def last_saved(run: Path) -> int:
    """The step of the newest complete checkpoint."""
    return max([0, *(int(path.name.removeprefix("step-")) for path in complete_checkpoints(run / "checkpoints"))])


def step_seconds(run: Path) -> float:
    return sum(line["seconds"] for line in lines(run, "step"))


def report(args: argparse.Namespace, whole: Path, killed: Path, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Checks the invariants and summarizes the soak. Raises SystemExit if one is violated."""
    expected, actual = lines(whole, "step"), lines(killed, "step")
    if [line["step"] for line in actual] != list(range(1, args.steps + 1)):
        raise SystemExit("soak: metrics.jsonl does not have every step exactly once")
    differing = [a["step"] for a, b in zip(expected, actual, strict=True) if a["loss"] != b["loss"]]
    if differing:
        raise SystemExit(f"soak: losses differ starting at step {differing[0]}")
    heldout = [lines(run, "eval")[-1]["heldout_loss"] for run in (whole, killed)]
    if heldout[0] != heldout[1]:
        raise SystemExit(f"soak: held-out loss is {heldout[1]}, and {heldout[0]} without kills")
    leftovers = [path.name for path in (killed / "checkpoints").iterdir() if not path.name.startswith("step-")]
    leftovers += [path.name for path in killed.glob("*.lock")]
    if leftovers:
        raise SystemExit(f"soak: leftover files: {leftovers}")
    subprocess.run([*BOOST, "checkpoint", "verify", str(killed)], check=True, stdout=subprocess.DEVNULL)
    lost = [each["reached"] - each["saved"] for each in rounds]
    return {
        "kills": len(rounds),
        "steps": args.steps,
        "by_phase": dict(Counter(each["phase"] for each in rounds)),
        "by_victim": dict(Counter(f"{each['signal']} to {each['victim']}" for each in rounds)),
        "steps_lost_median": statistics.median(lost),
        "steps_lost_most": max(lost),
        "seconds_from_signal_to_end_median": statistics.median(each["ended_s"] for each in rounds),
        "seconds_from_signal_to_end_most": max(each["ended_s"] for each in rounds),
        "warnings": sum(len(each["warnings"]) for each in rounds),
        "heldout_loss": heldout[1],
        "heldout_loss_undisturbed": heldout[0],
    }


if __name__ == "__main__":
    sys.exit(main())
