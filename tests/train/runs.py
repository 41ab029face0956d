"""A toy run on the test corpus, without the command line."""

import contextlib
import functools
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from boost.config import Config
from boost.config.architecture import IGNORED
from boost.data.batches import Batch
from boost.parallel.mesh import Mesh, mesh_of
from boost.train.builtin_hooks import builtin_hooks
from boost.train.events import SaveEnd, SaveStart, StepEnd, StepStart
from boost.train.hooks import Hook
from boost.train.loop import Trainer
from boost.train.metrics import read_metrics
from boost.train.resume import resume_candidates
from boost.train.rundir import RunDirectory
from boost.train.step import Stepper
from tests import toy

RATE = 3e-3
"""Learning rate of every step here. At 1e-2, the toy model amplifies a difference of one bit to 1e-6 within 100 steps."""


def make_config(
    store: Path | dict[str, float], folder: Path, tp: int = 1, dtype: str = "float64", **sections: Any
) -> Config:
    """A run in a folder, on a store or a mixture."""
    sections["train"] = {"steps": 6, "seq_len": 32, "micro_batch": 2, "global_batch": 4, **sections.get("train", {})}
    return toy.toy_config(
        dtype,
        model={"vocab_size": 300, **sections.pop("model", {})},
        parallel={"tp": tp, **sections.pop("parallel", {})},
        optim={"lr": RATE, "warmup_steps": 3},
        data={"store": str(store)} if isinstance(store, Path) else {"mixture": store},
        run={"dir": str(folder), "device": "cpu", "peak_tflops": 1.0, **sections.pop("run", {})},
        **sections,
    )


def make_trainer(config: Config, *hooks: Hook, **stepping: bool) -> Trainer:
    """Creates the trainer on the current process group. `stepping`: `ahead` and `from_tensors` of `Stepper`."""
    mesh = mesh_of(config.parallel, toy.CPU) if config.parallel.world_size > 1 else Mesh(toy.CPU)
    build = functools.partial(Stepper, **stepping)  # type: ignore[arg-type]
    return Trainer(config, mesh, RunDirectory(config.run.dir), [*hooks, *builtin_hooks(config)], build)


def started(config: Config, *hooks: Hook, resume: str | None = None, **stepping: bool) -> Trainer:
    """A trainer before its first step. `resume`: as for `boost train`."""
    trainer = make_trainer(config, *hooks, **stepping)
    trainer.start(resume_candidates(resume, trainer.run))
    return trainer


def fitted(config: Config, *hooks: Hook, resume: str | None = None) -> Trainer:
    """A trainer at the end of its run."""
    trainer = started(config, *hooks, resume=resume)
    trainer.fit()
    return trainer


class Do(Hook):
    """Calls `action(trainer)` at one event of one step, on one process or on all."""

    def __init__(self, event: str, step: int, action: Callable[[Trainer], object], rank: int | None = None) -> None:
        self.at, self.action, self.rank = (event, step), action, rank

    def _happen(self, trainer: Trainer, event: str, step: int) -> None:
        if self.at == (event, step) and self.rank in (None, trainer.mesh.rank):
            self.action(trainer)

    def on_train_start(self, trainer: Trainer) -> None:
        self._happen(trainer, "on_train_start", trainer.position.step)

    def before_step(self, trainer: Trainer, event: StepStart) -> None:
        self._happen(trainer, "before_step", event.step)

    def after_step(self, trainer: Trainer, event: StepEnd) -> None:
        self._happen(trainer, "after_step", event.metrics.step)

    def before_save(self, trainer: Trainer, event: SaveStart) -> None:
        self._happen(trainer, "before_save", event.step)

    def after_save(self, trainer: Trainer, event: SaveEnd) -> None:
        self._happen(trainer, "after_save", event.step)


def request_stop(trainer: Trainer) -> None:
    trainer.request_stop("the test")


def losses(run: Path) -> list[float]:
    """Of the steps in metrics.jsonl."""
    return [line["loss"] for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "step"]


EVENTS = [name for name in vars(Hook) if not name.startswith("_") and name not in ("main_only", "state", "take_state")]


class Recorder(Hook):
    """Records every event: its name, and what comes with it."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    def __getattribute__(self, name: str) -> Any:
        if name in EVENTS:
            return lambda _, event=None: self.events.append((name, event))
        return super().__getattribute__(name)

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.events]

    def of(self, name: str) -> list[Any]:
        """What came with the events of this name."""
        return [event for other, event in self.events if other == name]


class Warnings(Hook):
    """Records warnings."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_warning(self, trainer: Trainer, text: str) -> None:
        self.seen.append(text)


class Scale(Hook):
    """Multiplies the weights of the head before a step: the loss grows, but stays finite. Ends the run after step `kill_after`."""

    def __init__(self, step: int, factor: float, kill_after: int = 0) -> None:
        self.step, self.factor, self.kill_after = step, factor, kill_after
        self.losses: list[float] = []

    def before_step(self, trainer: Trainer, event: StepStart) -> None:
        if event.step == self.step:
            with torch.no_grad():
                trainer.model.head.mul_(self.factor)

    def after_step(self, trainer: Trainer, event: StepEnd) -> None:
        self.losses.append(event.metrics.loss)
        if event.metrics.step == self.kill_after:
            raise KeyboardInterrupt


@contextlib.contextmanager
def small_disk(path: Path, size: int) -> Iterator[Path]:
    """A file system of `size` bytes; skips the test if mounting is not allowed."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    if not shutil.which("mount") or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def mask_step(trainer: Trainer, step: int) -> None:
    """Makes no token of this step's batch count toward the loss."""
    usual = trainer.batches.numbered

    def numbered(number: int, *rest: Any) -> Any:
        for batch in usual(number, *rest):
            masked = np.full_like(batch.targets, IGNORED)
            yield Batch(batch.tokens, masked if number == step - 1 else batch.targets, batch.document_ids)

    trainer.batches.numbered = numbered  # type: ignore[method-assign]
