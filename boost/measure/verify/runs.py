"""Full runs of `boost train` on a small model: one is repeated, one is killed and resumed, one is resumed on another mesh, one
hangs, and one is stopped."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from boost.config.schema import ModelConfig
from boost.errors import BoostError
from boost.measure.verify.report import Found, Report
from boost.train.checkpoint import checkpoint_path, complete_checkpoints
from boost.train.metrics import read_metrics
from boost.train.rendezvous import choose_device

STEPS, SAVE_EVERY, FAULT = 12, 4, 10
HANG_S, HANG_ON_GPU_S = 5, 30
"""Timeout of a collective in the run that hangs, in seconds. On GPUs, processes connect and compile kernels in the first step,
and some take longer than others."""

HANG_MARGIN_S = 10.0
"""Seconds after this timeout within which the run must end."""

STOP_S = 60.0
"""Seconds after SIGTERM within which a run must save and exit."""

LIMIT_S = 300.0
"""Timeout of one command in seconds; a slower command counts as hanging."""

TOLERANCE = 1e-5
"""Maximum relative difference of losses on another mesh, in float32."""

TITLE = "Full runs: boost train"


class RunError(Exception):
    """A run did not behave as expected."""


def verify(report: Report, model: ModelConfig, processes: int, device: str) -> None:
    """Runs all checks with `processes` processes on this machine."""
    report.section(TITLE)
    with _exits_at_sigterm(), tempfile.TemporaryDirectory(prefix="boost-verify-") as folder:
        trial = _Trial(Path(folder), model, processes, device)
        checks: dict[str, Callable[[], Found]] = {"trains and saves": trial.first, "deterministic": trial.deterministic}
        checks["killed and resumed"] = trial.killed
        if processes > 1:
            checks |= {"resumed on another mesh": trial.on_another_mesh, "hanging process": trial.hangs}
        checks["stopped by SIGTERM"] = trial.stopped
        for name, check in checks.items():
            with report.timed(TITLE, name) as note:
                try:
                    result = check()
                except (RunError, BoostError, OSError, ValueError, KeyError, IndexError) as error:
                    result = Found("failed", " ".join(str(error).split()), "for more, run boost train --inject-fault")
                note(result)
            if name == "trains and saves" and result.verdict != "ok":
                return  # the other checks compare their runs with this one


@contextmanager
def _exits_at_sigterm() -> Iterator[None]:
    """Makes SIGTERM raise SystemExit. By default, it ends a process without running `finally` blocks, and the run that this
    process started would continue, because it is in a separate session."""
    usual = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, usual)


class _Trial:
    """The runs of one verification, in one folder. Each check returns its result, or raises RunError."""

    def __init__(self, folder: Path, model: ModelConfig, processes: int, device: str) -> None:
        self.folder, self.model, self.processes, self.device = folder, model, processes, device
        self.config = folder / "run.toml"
        self.rank = processes - 1
        """The process that is killed or hangs."""

    def first(self) -> Found:
        """Prepares a token store from a few modules of the standard library, and trains."""
        import argparse
        import ast
        import secrets
        import textwrap

        from boost.data.prepare import PrepareOptions, prepare

        inputs = tuple(str(module.__file__) for module in (argparse, ast, secrets, textwrap))
        store = self.folder / "store"
        prepare(PrepareOptions(out=store, inputs=inputs, tokenizer="train:300", heldout=0.1))
        own = "".join(f"{name} = {json.dumps(value)}\n" for name, value in type(self.model).smallest(32).items())
        tp = 2 if self.processes % 2 == 0 else 1
        self.config.write_text(
            f'[model]\nfamily = "{self.model.family}"\nvocab_size = 300\ndim = 32\nffn_dim = 48\nlayers = 2\nheads = 4\n{own}'
            f"[parallel]\ntp = {tp}\ndp = {self.processes // tp}\n"
            f"[train]\nseq_len = 32\nglobal_batch = {4 * self.processes}\nmicro_batch = 4\nsteps = {STEPS}\n"
            f"save_every = {SAVE_EVERY}\nkeep = 100\ndeterministic = true\neval_tokens = 320\nlog_every = 1\n"
            f'[data]\nstore = "{store}"\n[run]\ndevice = "{self.device}"\npeak_tflops = 1\n',
            encoding="utf-8",
        )
        self._succeeds("first")
        return Found("ok", f"{STEPS} steps, a checkpoint every {SAVE_EVERY} steps; processes: {self.processes}")

    def deterministic(self) -> Found:
        self._succeeds("second")
        return self._equals_first("second", 0, "the same command twice")

    def killed(self) -> Found:
        rank = self.rank
        code, line = self._train("killed", "--inject-fault", f"kill@{FAULT}:{rank}")
        named = f"process {self.processes} of {self.processes} (rank {rank}) was killed by SIGKILL"
        if self.processes > 1 and (code != 3 or named not in line):
            raise RunError(f"rank {rank} was killed, but the run exited with code {code} and reported: {line}")
        last = self._last_saved("killed")
        self._succeeds("killed", "--resume", "auto")
        return self._equals_first("killed", last, f"rank {rank} killed in step {FAULT}, resumed from step {last}")

    def on_another_mesh(self) -> Found:
        """Resumes a checkpoint saved on a mesh with TP, as FSDP over all processes."""
        saved = checkpoint_path(self.folder / "first" / "checkpoints", SAVE_EVERY)
        words = ("--parallel.tp", "1", "--parallel.dp", str(self.processes), "--parallel.shard", "full")
        self._succeeds("elsewhere", "--resume", str(saved), *words)
        first, other = self._metrics("first"), self._metrics("elsewhere")
        worst = max(abs(other[step][0] / first[step][0] - 1) for step in other if step > SAVE_EVERY)
        if worst > TOLERANCE:
            raise RunError(
                f"losses differ by up to {worst:.1e}, more than rounding can explain (limit: {TOLERANCE:.0e})"
            )
        return Found("ok", f"resumed a TP checkpoint as FSDP over {self.processes} ranks: losses differ by {worst:.0e}")

    def hangs(self) -> Found:
        rank = self.rank
        limit = HANG_ON_GPU_S if choose_device(self.device).type == "cuda" else HANG_S
        code, line = self._train("hangs", "--inject-fault", f"hang@{FAULT}:{rank}", "--run.timeout_s", str(limit))
        seconds = time.time() - (self.folder / "hangs" / "metrics.jsonl").stat().st_mtime
        if code != 3 or f"(rank {rank}) is not responding" not in line:
            raise RunError(f"rank {rank} hung, but the run exited with code {code} and reported: {line}")
        if seconds > limit + HANG_MARGIN_S:
            late = f"hang of rank {rank} reported after {seconds:.0f} s (timeout {limit} s)"
            return Found("note", late, "is this machine busy?")
        return Found("ok", f"hang of rank {rank} reported {seconds:.0f} s after the last step (timeout {limit} s)")

    def stopped(self) -> Found:
        metrics = self.folder / "stopped" / "metrics.jsonl"
        with self._started("stopped", "--train.steps", "100000", "--train.save_every", "0") as process:
            deadline = time.monotonic() + LIMIT_S
            while not (metrics.is_file() and len(metrics.read_text(encoding="utf-8").splitlines()) >= 3):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RunError(f"the run completed no steps: {_ended(process)[1]}")
                time.sleep(0.05)
            begun = time.monotonic()
            process.send_signal(signal.SIGTERM)
            code, line = _ended(process)
            seconds = time.monotonic() - begun
        if code:
            raise RunError(f"the run exited with code {code} after SIGTERM: {line}")
        detail = f"saved step {self._last_saved('stopped')} and exited with code 0 after {seconds:.1f} s"
        return Found("ok" if seconds <= STOP_S else "note", detail)

    def _train(self, name: str, *words: str) -> tuple[int, str]:
        """Runs `boost train` with a run directory of this name. Returns (exit code, error line). Raises RunError if it does not
        exit."""
        with self._started(name, *words) as process:
            return _ended(process)

    def _succeeds(self, name: str, *words: str) -> None:
        code, line = self._train(name, *words)
        if code:
            raise RunError(f"the run exited with code {code}: {line}")

    @contextmanager
    def _started(self, name: str, *words: str) -> Iterator[subprocess.Popen[str]]:
        """Context manager: runs the command, and kills it and its child processes on exit."""
        train = ["-m", "boost.cli.main", "train", str(self.config), "--run.dir", str(self.folder / name)]
        process = subprocess.Popen(
            [sys.executable, *train, *words],
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

    def _metrics(self, name: str) -> dict[int, tuple[float, float]]:
        """(loss, gradient norm) by step, from the latest run of a repeated step."""
        lines = read_metrics(self.folder / name / "metrics.jsonl")
        return {line["step"]: (line["loss"], line["gradient_norm"]) for line in lines if line["kind"] == "step"}

    def _equals_first(self, name: str, begin: int, detail: str) -> Found:
        """Compares the steps after `begin` with those of the first run, bit by bit."""
        first, other = self._metrics("first"), self._metrics(name)
        steps = [step for step in sorted(other) if step > begin]
        apart = [step for step in steps if step in first and first[step] != other[step]]
        if apart or not steps:
            raise RunError(
                f"loss and gradient norm differ from those of the first run, starting at step {apart[0] if apart else begin + 1}"
            )
        return Found("ok", f"{detail}: loss and gradient norm of {len(steps)} steps are bitwise equal")

    def _last_saved(self, name: str) -> int:
        """Step of the latest complete checkpoint."""
        paths = list(complete_checkpoints(self.folder / name / "checkpoints"))
        if not paths:
            raise RunError("the run left no complete checkpoint")
        return max(int(json.loads((path / "state.json").read_text())["step"]) for path in paths)


def _ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        _, errors = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        raise RunError(f"the run did not exit within {LIMIT_S:.0f} s") from None
    lines = [line for line in errors.splitlines() if "error" in line] or errors.splitlines()[-1:]
    return process.returncode, (lines or [""])[0].removeprefix("boost: error: ")
