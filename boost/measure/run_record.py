"""Reads the run directories of finished or ongoing runs, without changing anything."""

import contextlib
import datetime
import math
import os
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from boost.errors import ConfigError, DataError
from boost.text import read_toml
from boost.train.metrics import read_metrics
from boost.train.run_lock import is_held
from boost.train.rundir import RunDirectory

State = Literal["running", "done", "stopped", "failed"]
"""failed: the run ended with an error or was killed."""

RECENT = 10
"""Steps over which the train loss is averaged, because a single step's loss is noisy."""
DEPTH = 5
"""Number of folder levels to search for runs."""


@dataclass(frozen=True)
class RunRecord:
    """One run directory and its run's numbers so far. A number is None if there is no data for it."""

    path: Path
    state: State
    reason: str
    """Why the run was stopped; '' if it was not."""
    updated: datetime.datetime | None
    """Time of the last metric, UTC."""
    step: int
    """Steps done."""
    total_steps: int
    tokens: int
    """Tokens trained on."""
    loss: float | None
    """Mean train cross-entropy over the last RECENT steps, in nats per token, also if the run distills."""
    heldout_loss: float | None
    """Held-out loss in the last evaluation, in nats per token."""
    best_heldout_loss: float | None
    """Lowest held-out loss over all evaluations."""
    best_step: int | None
    """The step of that evaluation."""
    tokens_per_second: float | None
    """Median over the steps."""
    mfu: float | None
    """Median over the steps, as a fraction."""
    memory_bytes: int | None
    """Peak memory of the main process."""
    seconds: float
    """Wall-clock time for all steps, excluding startup, evaluations and saves."""
    damaged_lines: int
    """Unreadable lines in metrics.jsonl, other than an incomplete last one."""


def find_runs(folder: Path) -> list[Path]:
    """Sorted run directories in a folder, or the folder itself if it is a run directory. Raises DataError if there are none."""
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
        with contextlib.suppress(OSError):  # another user's folder
            for entry in os.scandir(folder):
                if entry.is_dir() and not entry.name.startswith("."):
                    yield from _runs_below(Path(entry.path), depth - 1)


def is_run(folder: Path) -> bool:
    """Whether `boost train` created this folder."""
    return (folder / "config.toml").is_file() and (folder / "checkpoints").is_dir()


def read_run(path: Path) -> RunRecord:
    """Reads a run directory. Raises DataError if it is not one."""
    if not is_run(path):
        raise DataError(f"'{path}' is not a run directory: it lacks a config.toml file or a checkpoints folder")
    run, damaged = RunDirectory(path), list[int]()
    lines, updated = [], None
    with contextlib.suppress(FileNotFoundError):
        lines = read_metrics(run.metrics, damaged)
        updated = datetime.datetime.fromtimestamp(run.metrics.stat().st_mtime, datetime.UTC)
    last = lines[-1] if lines else {}
    state: State = "failed"
    reason = ""
    if is_held(run.path):
        state = "running"
    elif last.get("kind") == "end":
        state, reason = ("stopped" if last["state"] == "stopped" else "done"), last["reason"]
    for line in lines:
        if line.get("cross_entropy") is not None:  # the loss of a distillation has other terms, too
            line["loss"] = line["cross_entropy"]
    steps, evaluations = ([line for line in lines if line["kind"] == kind] for kind in ("step", "eval"))
    names = ((re.fullmatch(r"config(?:\.(\d+))?\.toml", file.name), file) for file in path.glob("config*.toml"))
    # The configuration of the last start, with every field resolved.
    _, file = max((int(name[1] or 1), file) for name, file in names if name)
    try:
        train = read_toml(file).get("train")
        total = train.get("steps") if isinstance(train, dict) else None
    except ConfigError as error:
        raise DataError(f"{error}; restore it, or move this run elsewhere") from None
    losses, speeds, mfus, seconds = (
        [line[name] for line in steps if math.isfinite(line[name])]
        for name in ("loss", "tokens_per_second", "mfu", "seconds")
    )
    heldout = [(line["heldout_loss"], line["step"]) for line in evaluations if math.isfinite(line["heldout_loss"])]
    best = min(heldout, default=None)
    return RunRecord(
        path,
        state,
        reason,
        updated,
        step=steps[-1]["step"] if steps else 0,
        total_steps=total if isinstance(total, int) else 0,
        tokens=steps[-1]["tokens"] if steps else 0,
        loss=statistics.fmean(losses[-RECENT:]) if losses else None,
        heldout_loss=heldout[-1][0] if heldout else None,
        best_heldout_loss=best[0] if best else None,
        best_step=best[1] if best else None,
        tokens_per_second=statistics.median(speeds) if speeds else None,
        mfu=statistics.median(mfus) if mfus else None,
        memory_bytes=max((line["memory_bytes"] for line in steps), default=None),
        seconds=sum(seconds),
        damaged_lines=len(damaged),
    )
