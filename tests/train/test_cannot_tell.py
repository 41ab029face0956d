"""A file of which the system cannot tell whether it is there, or what it holds, ends no run: the run goes on, or ends with a
checkpoint in run.fallback_dir."""

import errno
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from boost.data import blocks
from boost.errors import DamagedCheckpointError, UnreadableDataError
from boost.parallel.mesh import Mesh
from boost.train import best_effort, run_lock
from boost.train import checkpoint as ckpt
from boost.train.events import StepEnd, StepStart
from boost.train.loop import Trainer
from boost.train.metrics import MetricsHook
from boost.train.run_lock import RunLock
from tests import toy
from tests.distributed import run_distributed
from tests.train.commands import saved_steps
from tests.train.reads import watched
from tests.train.runs import Warnings, make_config, make_trainer
from tests.train.saves import mesh_config, save

STEPS, FIRST, STEP_S = 8, 4, 15.0
"""Steps of a run, the one after which a file cannot be read, and a step's duration on the clock of these tests."""
OUTAGES = {"60 s": 60.0, "for good": 1e9}
ERRORS = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT)
CALLS = ("open", "stat", "read")
ALL = "run/"
"""The whole run directory."""


class Outage(Warnings):
    """A hook that makes a call fail for one file. Records the calls that a run makes after step FIRST, its losses and warnings."""

    def __init__(self, folders: dict[str, Path], call: str = "", name: str = "", error: int = 0, outage: str = "60 s"):
        super().__init__()
        self.folders, self.call, self.name, self.error, self.seconds = folders, call, name, error, OUTAGES[outage]
        self.now, self.since = 100.0, 1e9
        self.calls, self.failed = set[tuple[str, str]](), 0
        self.losses: list[float] = []

    def see(self, call: str, path: str) -> None:
        place = next((name for name, folder in self.folders.items() if path.startswith(str(folder))), None)
        if place is None or self.now < self.since:
            return
        call = {"write": "open", "lstat": "stat"}.get(call, call)
        name = f"{place}{path.removeprefix(str(self.folders[place]))}"
        name = re.sub(r"\b[0-9a-f]{8}\b|\d+", "N", re.sub("events.out.*", "events", name))
        self.calls.add((call, name))
        fails = name.startswith(ALL) if self.name == ALL else name == self.name
        if fails and self.call in (call, "any") and self.now < self.since + self.seconds:
            self.failed += 1
            raise OSError(self.error, os.strerror(self.error), path)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    def before_step(self, trainer: Trainer, event: StepStart) -> None:
        self.pass_time(STEP_S)

    def after_step(self, trainer: Trainer, event: StepEnd) -> None:
        self.losses.append(event.metrics.loss)
        if event.metrics.step == FIRST:
            self.since = self.now


@pytest.fixture(autouse=True)
def nothing_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(best_effort, "_failing", set())


def train(store: Path, folder: Path, *fault: Any, **stepping: Any) -> tuple[Outage, Trainer, str]:
    """A run with an `Outage`, and why it ended early."""
    outage, said = Outage({"run": folder / "run", "store": store}, *fault), ""
    options = {"steps": STEPS, "save_every": 2, "keep": 1, "keep_best": True, "eval_every": 2, "eval_tokens": 64}
    options |= {"sample_tokens": 2, "async_save": outage.seconds == OUTAGES["for good"]}
    run = {"fallback_dir": str(folder / "spare"), "save_retry_minutes": 0.0}
    config = make_config(store, folder / "run", train=options, run=run)
    trainer = make_trainer(config, outage, MetricsHook(), **stepping)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_lock, "_now", lambda: outage.now)
        patch.setattr(blocks, "time", SimpleNamespace(sleep=outage.pass_time))
        with RunLock(folder / "run", beat_s=1e6) as lock, watched(outage.see):
            lock._beat_s = 5.0  # its thread does not look
            trainer.run.lock = lock
            trainer.start([])
            try:
                trainer.fit()
            except UnreadableDataError as error:
                said = str(error)
    newest = max(
        (path for place in trainer.saves.folders for path in ckpt.complete_checkpoints(place)), key=ckpt.step_of
    )
    assert ckpt.open_checkpoint(newest).position.step == trainer.position.step, "nothing is lost"
    with ckpt.verifying(newest, config.model, Mesh(toy.CPU)):
        pass
    assert said or trainer.position.step == STEPS
    return outage, trainer, said


@pytest.fixture(scope="module")
def usual(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Outage:
    """Of a run in which nothing fails."""
    return train(store, tmp_path_factory.mktemp("usual"))[0]


def require_outcome(store: Path, folder: Path, usual: Outage, call: str, name: str, error: int, outage: str) -> None:
    seen, _, said = train(store, folder, call, name, error, outage)
    assert seen.failed, (call, name)
    assert seen.losses == usual.losses[: len(seen.losses)], "a run that goes on is the same run"
    assert not said or (name.startswith("store/") and outage == "for good" and os.strerror(error) in said)
    assert len(seen.seen) == len(set(seen.seen)) or name != "run/run.lock", "one warning, not one at each step"


@pytest.mark.parametrize(
    ("call", "name", "error", "outage"),
    [
        ("any", ALL, errno.EIO, "for good"),
        ("stat", "run/run.lock", errno.ESTALE, "60 s"),
        ("open", "run/run.lock", errno.EIO, "for good"),
        ("read", "run/run.lock", errno.ETIMEDOUT, "for good"),
        ("stat", "run/checkpoints/.step-N.N.tmp", errno.EIO, "60 s"),
        ("read", "run/checkpoints/step-N/state.json", errno.EIO, "for good"),
        ("read", "store/train.tokens", errno.ETIMEDOUT, "60 s"),
        ("read", "store/train.tokens", errno.ESTALE, "for good"),
        ("read", "store/heldout.tokens", errno.EIO, "for good"),
    ],
)
def test_a_file_that_the_system_cannot_tell_of_ends_no_run(
    store: Path, tmp_path: Path, usual: Outage, call: str, name: str, error: int, outage: str
) -> None:
    require_outcome(store, tmp_path, usual, call, name, error, outage)


def train_blind(store: Path, folder: Path, name: str, ahead: bool) -> tuple[str, int, list[str]]:
    """A run on two processes, of which the second cannot read a file. Returns the error, the step, and the warnings."""
    config = make_config(store, folder, tp=2, train={"steps": STEPS, "eval_every": 4, "eval_tokens": 64})
    outage, said = Outage({"store": store}, "read", name, errno.EIO, "for good"), ""
    trainer = make_trainer(config, outage, ahead=ahead)
    if trainer.mesh.rank == 0:
        outage.name = ""
    with pytest.MonkeyPatch.context() as patch, watched(outage.see):
        patch.setattr(blocks, "PAUSES_S", (0.0,))
        trainer.start([])
        try:
            trainer.fit()
        except UnreadableDataError as error:
            said = str(error)
    return said, trainer.position.step, outage.seen


@pytest.mark.parametrize("ahead", [False, True])
def test_all_processes_save_and_end_if_one_cannot_read_its_data(store: Path, tmp_path: Path, ahead: bool) -> None:
    """With `ahead`, the others have already launched the passes of the next step."""
    (said, step, _), other = run_distributed(2, train_blind, store, tmp_path / "run", "store/train.tokens", ahead)
    assert (said, step) == other[:2] and "train.tokens cannot be read: Input/output error" in said
    assert f"saved at step {step}" in said and FIRST < step < STEPS
    assert saved_steps(tmp_path / "run") == [step]


def test_all_processes_leave_out_an_evaluation_that_one_cannot_read(store: Path, tmp_path: Path) -> None:
    """But not the last one."""
    (said, step, warned), other = run_distributed(
        2, train_blind, store, tmp_path / "run", "store/heldout.tokens", False
    )
    assert (said, step) == other[:2] == (said, STEPS) and "heldout.tokens cannot be read" in said
    assert [text.partition(":")[0] for text in warned] == [text.partition(":")[0] for text in other[2]]
    assert warned[0].startswith("no evaluation at step 4: ") and saved_steps(tmp_path / "run") == [STEPS]


@pytest.mark.parametrize("call", ["stat", "open", "read"])
def test_what_cannot_be_read_is_not_rotated_by_nor_rotated_away(tmp_path: Path, call: str) -> None:
    paths = [save(tmp_path, mesh_config(1), step)[1] for step in (1, 2, 3)]
    outage = Outage({"": tmp_path}, call, "/step-N/state.json", errno.ESTALE, "for good")
    outage.since = 0.0
    with watched(outage.see), pytest.raises(OSError, match="Stale file handle"):
        ckpt.rotate(tmp_path, 1, 0, ())
    assert ckpt.complete_checkpoints(tmp_path) == paths
    outage.name, outage.call = ALL, "any"
    outage.folders = {"run": tmp_path}

    def read(_: ckpt.Checkpoint) -> None:
        outage.since = 0.0
        raise DamagedCheckpointError("cannot be read")

    outage.since = 1e9
    with watched(outage.see), pytest.raises(DamagedCheckpointError, match="^cannot be read$"):
        ckpt.read_checkpoint(paths[0], read)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("outage", OUTAGES)
@pytest.mark.parametrize("error", ERRORS)
def test_no_file_that_a_training_touches_ends_it(
    store: Path, tmp_path: Path, usual: Outage, error: int, outage: str
) -> None:
    calls = {*usual.calls, ("any", ALL), *((call, ALL) for call in CALLS)}
    assert len(calls) > 25 and {("stat", "run/run.lock"), ("read", "store/train.tokens")} <= calls
    for number, (call, name) in enumerate(sorted(calls)):
        require_outcome(store, tmp_path / str(number), usual, call, name, error, outage)
