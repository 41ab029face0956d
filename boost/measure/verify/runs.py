"""Full runs of `boost train` on a small model: one is repeated, one killed and resumed, one resumed on another mesh, one hangs, and
one is stopped."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from boost.config.schema import ModelConfig
from boost.measure.verify.report import Found, Report
from boost.train.checkpoint import checkpoint_path, complete_checkpoints

STEPS, SAVE_EVERY, FAULT = 12, 4, 10
HANG_S = 5
"""Timeout of a collective, in seconds, in the run that hangs."""

HANG_MARGIN_S = 10.0
"""Seconds after this timeout within which the run must end."""

STOP_S = 60.0
"""Seconds within which a stopped run must save and exit, including startup."""

LIMIT_S = 300.0
"""Timeout of one command in seconds; a longer one counts as hanging."""

TOLERANCE = 1e-5
"""Maximum relative difference of losses on another mesh, in float32."""

TITLE = "Full runs: boost train"


class RunError(Exception):
    """A run did not behave as expected."""


@dataclass(frozen=True)
class _Trial:
    """The runs of one verification, in one folder."""

    folder: Path
    config: Path

    @classmethod
    def create(cls, folder: Path, model: ModelConfig, processes: int, device: str) -> "_Trial":
        """Prepares a token store from a few modules of the standard library. Raises BoostError."""
        import argparse
        import ast
        import secrets
        import textwrap

        from boost.data.prepare import PrepareOptions, prepare

        inputs = tuple(str(module.__file__) for module in (argparse, ast, secrets, textwrap))
        store = folder / "store"
        prepare(PrepareOptions(out=store, inputs=inputs, tokenizer="train:300", heldout=0.1))
        rank = "rank = 8\n" if model.low_rank else ""
        tp = 2 if processes % 2 == 0 else 1
        config = folder / "run.toml"
        config.write_text(
            f'[model]\nfamily = "{model.family}"\nvocab_size = 300\ndim = 32\nffn_dim = 48\nlayers = 2\nheads = 4\n{rank}'
            f"[parallel]\ntp = {tp}\ndp = {processes // tp}\n"
            f"[train]\nseq_len = 32\nglobal_batch = {4 * processes}\nmicro_batch = 4\nsteps = {STEPS}\n"
            f"save_every = {SAVE_EVERY}\nkeep = 100\ndeterministic = true\neval_tokens = 320\nlog_every = 1\n"
            f'[data]\nstore = "{store}"\n[run]\ndevice = "{device}"\npeak_tflops = 1\n',
            encoding="utf-8",
        )
        return cls(folder, config)

    def command(self, name: str, *words: str) -> list[str]:
        """Command line of `boost train` with a run directory of this name."""
        train = [sys.executable, "-m", "boost.cli.main", "train", str(self.config)]
        return [*train, "--run.dir", str(self.folder / name), *words]

    def train(self, name: str, *words: str) -> tuple[int, str]:
        """Runs the command. Returns (exit code, error line). Raises RunError if it does not exit."""
        with self.started(name, *words) as process:
            return _ended(process)

    @contextmanager
    def started(self, name: str, *words: str) -> Iterator[subprocess.Popen[str]]:
        """Context in which the command runs; it is killed with its child processes at exit."""
        process = subprocess.Popen(
            self.command(name, *words),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()

    def metrics(self, name: str) -> dict[int, tuple[float, float]]:
        """(loss, gradient norm) by step; for a repeated step, the latest."""
        path = self.folder / name / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
        return {line["step"]: (line["loss"], line["gradient_norm"]) for line in lines if line["kind"] == "step"}

    def saved(self, name: str, step: int) -> Path:
        """Path of the checkpoint of a step."""
        return checkpoint_path(self.folder / name / "checkpoints", step)


def _ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        _, errors = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        raise RunError(f"the run did not exit within {LIMIT_S:.0f} s") from None
    lines = [line for line in errors.splitlines() if "error" in line] or errors.splitlines()[-1:]
    return process.returncode, (lines or [""])[0].removeprefix("boost: error: ")


def _succeed(outcome: tuple[int, str]) -> None:
    if outcome[0]:
        raise RunError(f"exit code {outcome[0]}: {outcome[1]}")


def verify(report: Report, model: ModelConfig, processes: int, device: str) -> None:
    """Runs all checks with `processes` processes on this machine."""
    report.section(TITLE)
    with tempfile.TemporaryDirectory(prefix="boost-verify-") as folder:
        trial: list[_Trial] = []

        def prepared() -> Found:
            trial.append(_Trial.create(Path(folder), model, processes, device))
            _succeed(trial[0].train("first"))
            return Found("ok", f"{STEPS} steps on {processes} processes, a checkpoint every {SAVE_EVERY} steps")

        if not _checked(report, "trains and saves", prepared):
            return
        checks: list[tuple[str, Callable[[_Trial, int], Found]]] = [("deterministic", _deterministic)]
        checks += [("killed and resumed", _killed)]
        checks += [("resumed on another mesh", _on_another_mesh)] if processes > 1 else []
        checks += [("hanging process", _hangs)] if processes > 1 else []
        checks += [("stopped by SIGTERM", _stopped)]
        for name, check in checks:
            _checked(report, name, lambda c=check: c(trial[0], processes))  # type: ignore[misc]


def _checked(report: Report, name: str, action: Callable[[], Found]) -> bool:
    with report.timed(TITLE, name) as note:
        try:
            found = action()
        except (RunError, OSError, ValueError, KeyError, IndexError) as error:
            found = Found("failed", " ".join(str(error).split()), "boost train --inject-fault shows more")
        note(found)
        return found.verdict == "ok"


def _differences(first: dict[int, tuple[float, float]], other: dict[int, tuple[float, float]]) -> list[int]:
    """Steps whose loss or gradient norm differs."""
    return [step for step in sorted(first.keys() & other.keys()) if first[step] != other[step]]


def _same(trial: _Trial, name: str, begin: int, detail: str) -> Found:
    first, other = trial.metrics("first"), trial.metrics(name)
    compared = [step for step in other if step > begin]
    apart = [step for step in _differences(first, other) if step > begin]
    if apart or not compared:
        raise RunError(f"loss and gradient norm differ from step {apart[0] if apart else begin + 1} on")
    return Found("ok", f"{detail}: loss and gradient norm of {len(compared)} steps are bitwise equal")


def _deterministic(trial: _Trial, processes: int) -> Found:
    _succeed(trial.train("second"))
    return _same(trial, "second", 0, "the same command twice")


def _killed(trial: _Trial, processes: int) -> Found:
    rank = processes - 1
    code, line = trial.train("killed", "--inject-fault", f"kill@{FAULT}:{rank}")
    named = f"process {processes} of {processes} (rank {rank}) was killed by SIGKILL"
    if processes > 1 and (code != 3 or named not in line):
        raise RunError(f"rank {rank} was killed, but the run reported (exit code {code}): {line}")
    last = max(int(json.loads((p / "state.json").read_text())["step"]) for p in _complete(trial, "killed"))
    _succeed(trial.train("killed", "--resume", "auto"))
    return _same(trial, "killed", last, f"rank {rank} killed in step {FAULT}, resumed from step {last}")


def _complete(trial: _Trial, name: str) -> list[Path]:
    found = list(complete_checkpoints(trial.folder / name / "checkpoints"))
    if not found:
        raise RunError("the run left no complete checkpoint")
    return found


def _on_another_mesh(trial: _Trial, processes: int) -> Found:
    """Resumes a checkpoint of a mesh with TP as FSDP over all processes."""
    begin = SAVE_EVERY
    words = ("--parallel.tp", "1", "--parallel.dp", str(processes), "--parallel.shard", "full")
    _succeed(trial.train("elsewhere", "--resume", str(trial.saved("first", begin)), *words))
    first, other = trial.metrics("first"), trial.metrics("elsewhere")
    worst = max(abs(other[step][0] / first[step][0] - 1) for step in other if step > begin)
    if worst > TOLERANCE:
        raise RunError(f"losses differ by up to {worst:.1e}, more than rounding ({TOLERANCE:.0e})")
    return Found("ok", f"a TP checkpoint resumed as FSDP over {processes}: losses within {worst:.0e}")


def _hangs(trial: _Trial, processes: int) -> Found:
    rank = processes - 1
    words = ("--inject-fault", f"hang@{FAULT}:{rank}", "--run.timeout_s", str(HANG_S))
    code, line = trial.train("hangs", *words)
    seconds = time.time() - (trial.folder / "hangs" / "metrics.jsonl").stat().st_mtime
    named = f"(rank {rank}) is not responding"
    if code != 3 or named not in line:
        raise RunError(f"rank {rank} hung, but the run reported (exit code {code}): {line}")
    if seconds > HANG_S + HANG_MARGIN_S:
        return Found(
            "note", f"rank {rank} reported after {seconds:.0f} s (timeout {HANG_S} s)", "is this machine busy?"
        )
    return Found("ok", f"rank {rank} reported {seconds:.0f} s after the last step (timeout {HANG_S} s)")


def _stopped(trial: _Trial, processes: int) -> Found:
    with trial.started("stopped", "--train.steps", "100000", "--train.save_every", "0") as process:
        deadline = time.monotonic() + LIMIT_S
        while not _has_steps(trial, 3):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RunError(f"the run completed no steps: {_ended(process)[1]}")
            time.sleep(0.05)
        begun = time.monotonic()
        process.send_signal(signal.SIGTERM)
        code, line = _ended(process)
        seconds = time.monotonic() - begun
    if code:
        raise RunError(f"exit code {code} after SIGTERM: {line}")
    step = max(int(json.loads((p / "state.json").read_text())["step"]) for p in _complete(trial, "stopped"))
    verdict: Any = "ok" if seconds <= STOP_S else "note"
    return Found(verdict, f"saved step {step} and exited with code 0 after {seconds:.1f} s")


def _has_steps(trial: _Trial, count: int) -> bool:
    path = trial.folder / "stopped" / "metrics.jsonl"
    return path.is_file() and len(path.read_text(encoding="utf-8").splitlines()) >= count
