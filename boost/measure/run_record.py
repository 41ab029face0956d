"""What run directories say of their runs, read without changing anything: finished runs, and runs in progress."""

import contextlib
import datetime
import math
import os
import re
import statistics
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from boost.config import load
from boost.errors import BoostError, DataError
from boost.train.metrics import flat_config, read_metrics
from boost.train.run_lock import is_held
from boost.train.rundir import RunDirectory

State = Literal["running", "done", "stopped", "failed"]
"""failed: it ended with an error or was killed."""

RECENT = 10
"""Steps over which the train loss is averaged: that of one step is noisy."""
DEPTH = 5
"""Folders below the given one in which runs are looked for."""


@dataclass(frozen=True)
class RunRecord:
    """One run directory."""

    path: Path
    config: dict[str, Any]
    """The configuration of the last start by dotted keys, every field resolved."""
    lines: list[dict[str, Any]] = field(repr=False)
    """The readable lines of metrics.jsonl."""
    damaged: int
    """Lines that are not readable, besides an incomplete last one."""
    state: State
    reason: str
    """Why it was stopped; '' if it was not."""
    updated: datetime.datetime | None
    """When a metric was last written, UTC."""

    def series(self, metric: str) -> list[tuple[int, float]]:
        """(step, value) of a field of steps or, if those do not have it, of evaluations; finite values only."""
        for kind in ("step", "eval"):
            points = [
                (line["step"], line[metric]) for line in self.lines if line.get("kind") == kind and metric in line
            ]
            if points:
                return [(step, value) for step, value in points if math.isfinite(value)]
        return []

    def summary(self) -> "RunSummary":
        """Its numbers."""
        steps = [line for line in self.lines if line.get("kind") == "step"]
        losses, heldout = self.series("loss"), self.series("heldout_loss")
        best = min(heldout, key=lambda point: point[1], default=None)
        speeds, mfus = ([value for _, value in self.series(name)] for name in ("tokens_per_second", "mfu"))
        return RunSummary(
            step=steps[-1]["step"] if steps else 0,
            total_steps=int(self.config.get("train.steps", 0)),
            tokens=steps[-1].get("tokens", 0) if steps else 0,
            loss=statistics.fmean(value for _, value in losses[-RECENT:]) if losses else None,
            heldout_loss=heldout[-1][1] if heldout else None,
            best_heldout_loss=best[1] if best else None,
            best_step=best[0] if best else None,
            tokens_per_second=statistics.median(speeds) if speeds else None,
            mfu=statistics.median(mfus) if mfus else None,
            memory_bytes=max((line.get("memory_bytes", 0) for line in steps), default=None),
            seconds=sum(value for _, value in self.series("seconds")),
        )


@dataclass(frozen=True)
class RunSummary:
    """The numbers of a run so far. None: there is nothing to compute it from."""

    step: int
    """Steps done."""
    total_steps: int
    tokens: int
    """Tokens trained on."""
    loss: float | None
    """Mean train loss of the last RECENT steps, nats per token."""
    heldout_loss: float | None
    """Of the last evaluation, nats per token."""
    best_heldout_loss: float | None
    """Lowest held-out loss of all evaluations."""
    best_step: int | None
    """Its step."""
    tokens_per_second: float | None
    """Median over the steps."""
    mfu: float | None
    """Median over the steps, a fraction."""
    memory_bytes: int | None
    """Peak of the main process."""
    seconds: float
    """Wall-clock time of all steps, without start-up, evaluations and saves."""


def config_difference(runs: Sequence[RunRecord]) -> dict[str, list[Any]]:
    """Values by key, one per run, of keys that are not equal in all; None where a run does not have the key. Without run.dir."""
    keys = dict.fromkeys(key for run in runs for key in run.config if key != "run.dir")
    values = {key: [run.config.get(key) for run in runs] for key in keys}
    return {key: of_runs for key, of_runs in values.items() if any(value != of_runs[0] for value in of_runs)}


def find_runs(folder: Path) -> list[Path]:
    """Run directories in a folder, sorted; the folder itself if it is one. Raises DataError if there is none."""
    if not folder.is_dir():
        raise DataError(f"no runs in '{folder}': no such folder")
    runs = sorted(_runs_below(folder, DEPTH))
    if not runs:
        raise DataError(f"no runs in '{folder}'; name the folder that holds your run directories, such as runs")
    return runs


def _runs_below(folder: Path, depth: int) -> Iterator[Path]:
    if is_run(folder):
        yield folder
    elif depth:
        with contextlib.suppress(OSError):  # a folder of someone else
            for entry in os.scandir(folder):
                if entry.is_dir() and not entry.name.startswith("."):
                    yield from _runs_below(Path(entry.path), depth - 1)


def is_run(folder: Path) -> bool:
    """Whether `boost train` has made this folder."""
    return (folder / "config.toml").is_file() and (folder / "checkpoints").is_dir()


def read_run(path: Path) -> RunRecord:
    """Reads a run directory. Raises DataError if it is none."""
    if not is_run(path):
        raise DataError(f"'{path}' is not a run directory: it has no config.toml next to a checkpoints folder")
    run, damaged = RunDirectory(path), list[int]()
    lines, updated = [], None
    with contextlib.suppress(FileNotFoundError):
        lines = read_metrics(run.metrics, damaged)
        updated = datetime.datetime.fromtimestamp(run.metrics.stat().st_mtime, datetime.UTC)
    lines = [line for line in lines if isinstance(line.get("step"), int)]
    last = lines[-1] if lines else {}
    state: State = "failed"
    reason = ""
    if is_held(run.path):
        state = "running"
    elif last.get("kind") == "end":
        state, reason = ("stopped" if last.get("state") == "stopped" else "done"), str(last.get("reason", ""))
    return RunRecord(path, _last_config(path), lines, len(damaged), state, reason, updated)


def _last_config(path: Path) -> dict[str, Any]:
    """The configuration of the last start; as written if it does not load here, such as one of a missing plugin."""
    names = ((re.fullmatch(r"config(?:\.(\d+))?\.toml", file.name), file) for file in path.glob("config*.toml"))
    _, file = max((int(name[1] or 1), file) for name, file in names if name)
    try:
        return flat_config(load(str(file)).model_dump(mode="json"))
    except BoostError:
        with contextlib.suppress(tomllib.TOMLDecodeError):
            return flat_config(tomllib.loads(file.read_text(encoding="utf-8", errors="replace")))
    raise DataError(f"'{file}' is not a TOML file; restore it, or leave out this run")
