"""Signals at any time (startup, step, evaluation, save): one consistent save, then a clean exit."""

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from boost.train import evaluate as evaluating
from boost.train.checkpoint import complete_checkpoints
from boost.train.events import TrainResult
from boost.train.heartbeat import Phase
from boost.train.hooks import Hook
from boost.train.metrics import MetricsHook, read_metrics
from boost.train.signals import StopRequest
from tests.distributed import run_distributed
from tests.matrices import first
from tests.train.commands import QUIET, Command, saved_steps
from tests.train.runs import Do, make_config, make_trainer, started


def signal_at(event: str, step: int, number: int = signal.SIGTERM, rank: int = 0) -> Hook:
    """Sends a signal to its own process."""
    return Do(event, step, lambda _: os.kill(os.getpid(), number), rank)


def run_with(store: Path, run: Path, hook: Hook, resume: list[Path] | None = None, **train: Any) -> TrainResult:
    trainer = make_trainer(
        make_config(store, run, train={"save_every": 2, "keep": 9, "async_save": False, **train}), hook, MetricsHook()
    )
    run.mkdir(exist_ok=True)
    with (
        StopRequest()
    ):  # `on_train_start` comes before the trainer catches signals; a command does so from its first line on
        trainer.start(resume or [])
        return trainer.fit()


@pytest.mark.parametrize(
    ("event", "number"),
    [
        ("before_save", signal.SIGTERM),
        ("after_save", signal.SIGUSR1),
        ("before_save", signal.SIGHUP),
        ("after_save", signal.SIGINT),
    ],
)
def test_a_signal_during_a_save_makes_no_second_one(store: Path, tmp_path: Path, event: str, number: int) -> None:
    result = run_with(store, tmp_path, signal_at(event, 2, number))
    assert (result.position.step, result.stopped_by) == (2, signal.Signals(number).name)
    assert saved_steps(tmp_path) == [2]


def test_a_signal_in_start_up_saves_where_the_run_starts_and_a_resume_loses_and_repeats_nothing(
    store: Path, tmp_path: Path
) -> None:
    result = run_with(store, tmp_path, signal_at("on_train_start", 0))
    assert (result.position.step, result.stopped_by, saved_steps(tmp_path)) == (0, "SIGTERM", [0])
    run_with(store, tmp_path, signal_at("before_step", 3), complete_checkpoints(tmp_path / "checkpoints"))
    (*_, newest) = before = complete_checkpoints(tmp_path / "checkpoints")
    written = newest.stat().st_mtime_ns
    result = run_with(store, tmp_path, signal_at("on_train_start", 3), [newest])
    assert (result.position.step, result.stopped_by, result.checkpoint) == (3, "SIGTERM", newest)
    assert complete_checkpoints(tmp_path / "checkpoints") == before and newest.stat().st_mtime_ns == written
    run_with(store, tmp_path, Hook(), [newest])
    run_with(store, tmp_path / "whole", Hook())
    ended = [read_metrics(run / "metrics.jsonl")[-2:] for run in (tmp_path, tmp_path / "whole")]
    assert ended[0][0]["heldout_loss"] == ended[1][0]["heldout_loss"] and ended[0][1] == ended[1][1]


def count_batches(patch: pytest.MonkeyPatch, at: int, action: Callable[[], None]) -> list[int]:
    """Counts evaluation batches and runs an action before one of them."""
    seen: list[int] = []

    def watched(batches: Any, *_: Any, **__: Any) -> Iterator[Any]:
        for number, batch in enumerate(batches):
            seen.append(number)
            if len(seen) == at:
                action()
            yield batch

    patch.setattr(evaluating, "progress", watched)
    return seen


def test_a_signal_during_an_evaluation_ends_it_within_a_few_batches(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = count_batches(monkeypatch, 6, lambda: os.kill(os.getpid(), signal.SIGTERM))
    result = run_with(store, tmp_path, Hook(), eval_every=1, eval_tokens=0)
    assert len(seen) <= 6 + evaluating.STOP_CHECK_EVERY
    assert (result.position.step, saved_steps(tmp_path)) == (1, [1])
    assert [line["kind"] for line in read_metrics(tmp_path / "metrics.jsonl")] == ["step", "end"]


def test_a_signal_during_the_last_evaluation_ends_a_run_that_is_saved(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count_batches(monkeypatch, 6, lambda: os.kill(os.getpid(), signal.SIGTERM))
    result = run_with(store, tmp_path, Hook(), eval_every=0)
    assert (result.position.step, result.stopped_by, result.evaluation) == (6, "SIGTERM", None)
    assert saved_steps(tmp_path) == [2, 4, 6]


def signalled_on_one(store: str, run: str, event: str) -> tuple[int, str | None, list[int]]:
    """Sends a signal to the second process only."""
    rank = torch.distributed.get_rank()
    with StopRequest(), pytest.MonkeyPatch.context() as patch:
        hook = Hook()
        if event != "evaluation":
            hook = signal_at(event, 0 if event == "on_train_start" else 2, rank=1)
        elif rank == 1:
            count_batches(patch, 6, lambda: os.kill(os.getpid(), signal.SIGTERM))
        # Without saves, only the statistics of the next step can tell the other process.
        sections = {"save_every": 0 if event == "after_step" else 2, "eval_every": 2 if event == "evaluation" else 0}
        trainer = started(make_config(Path(store), Path(run), tp=2, train=sections), hook)
        result = trainer.fit()
        torch.distributed.barrier()
    assert result.by_signal and result.received_signal == (rank == 1)
    return result.position.step, result.stopped_by, saved_steps(Path(run))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("event", "saved"), [("on_train_start", [0]), ("after_step", [3]), ("evaluation", [2]), ("before_save", [2])]
)
def test_all_processes_stop_where_one_got_the_signal(store: Path, tmp_path: Path, event: str, saved: list[int]) -> None:
    results = run_distributed(2, signalled_on_one, str(store), str(tmp_path), event)
    assert results == [(saved[-1], "a signal to another process", saved), (saved[-1], "SIGTERM", saved)]


def signalled_at_random(store: str, run: str, seed: int) -> tuple[int, str | None, list[int]]:
    """Sends a signal at a random time to one of the processes, which save and evaluate all the time."""
    chance = random.Random(seed)
    number = chance.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT])
    victim, after_s = chance.randrange(torch.distributed.get_world_size()), chance.random()
    sections = {"steps": 100000, "save_every": 2, "eval_every": 3, "eval_tokens": 640, "keep": 100000}
    with StopRequest():
        strike = threading.Timer(after_s, os.kill, (os.getpid(), number))
        if torch.distributed.get_rank() == victim:
            strike.start()
        trainer = started(make_config(Path(store), Path(run), tp=2, train=sections), MetricsHook())
        result = trainer.fit()
    torch.distributed.barrier()
    return result.position.step, result.stopped_by, saved_steps(Path(run))


@pytest.mark.slow
@pytest.mark.parametrize("seed", first(3, range(20)))
def test_a_signal_at_a_random_moment_makes_one_consistent_save(store: Path, tmp_path: Path, seed: int) -> None:
    results = run_distributed(2, signalled_at_random, str(store), str(tmp_path), seed)
    steps, names, saved = zip(*results, strict=True)
    assert steps[0] == steps[1] and saved[0] == saved[1]
    assert sorted(map(str, names))[1] == "a signal to another process", names
    assert saved[0][-1] == steps[0] == max([0, *(line["step"] for line in read_metrics(tmp_path / "metrics.jsonl"))])
    assert saved[0][:-1] == list(range(2, steps[0], 2)), "besides the periodic ones"


# Whole commands


def check_stopped(command: Command, number: int) -> None:
    """One consistent save of the last step, and a clean exit; or nothing at all, if the signal came first."""
    code, out, err = command.finish()
    assert code == 0, err
    assert "Traceback" not in out + err
    assert f"stopped by {signal.Signals(number).name}" in out or "stopped by a signal to another process" in out, (
        out + err
    )
    metrics = command.run / "metrics.jsonl"
    if "during startup, before the first step" in out:
        assert not metrics.exists() or not read_metrics(metrics)
        return
    steps = saved_steps(command.run)
    done = max([0, *(line["step"] for line in read_metrics(metrics) if line["kind"] == "step")])
    assert steps[-1] == done
    assert all(step % 20 == 0 for step in steps[:-1]), steps


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "number"),
    [
        (Phase.START_UP, signal.SIGTERM),
        pytest.param(Phase.EVALUATION, signal.SIGHUP, marks=pytest.mark.nightly),
        pytest.param(Phase.SAVE, signal.SIGUSR1, marks=pytest.mark.nightly),
    ],
)
def test_one_process_gets_a_signal(store: Path, tmp_path: Path, phase: Phase, number: int) -> None:
    with Command(tmp_path, store) as command:
        command.wait_for(lambda: phase in command.phases())
        folder = next(command.shared.glob("boost-launch-*"))
        assert folder.stat().st_mode & 0o077 == 0, "others could put objects into the store"
        os.kill(random.Random(str(phase)).choice(command.processes()), number)
        check_stopped(command, number)
    assert not list(command.shared.glob("boost-launch-*"))


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(20))
def test_one_process_gets_a_signal_at_a_random_moment(store: Path, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    number = chance.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
    with Command(tmp_path, store) as command:
        # Python itself needs a moment before it can catch anything.
        command.wait_for(lambda: command.shared.glob("boost-launch-*"))
        time.sleep(1 + chance.random() * 15)
        begin = time.monotonic()
        os.kill(chance.choice(command.processes()), number)
        check_stopped(command, number)
        assert time.monotonic() - begin <= 30, "a cluster kills then"


def listening(pids: list[int]) -> set[str]:
    """Addresses, in hexadecimal, on which these processes accept TCP connections or datagrams."""
    sockets = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(link)
            except FileNotFoundError:
                continue
            if target.startswith("socket:["):
                sockets.add(target[8:-1])
    found = set()
    for table, state in (("tcp", "0A"), ("tcp6", "0A"), ("udp", "07"), ("udp6", "07")):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == state and words[9] in sockets:
                found.add(words[1].split(":")[0])
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_one_machine_listens_on_loopback_only_saves_on_request_and_answers_ctrl_c(store: Path, tmp_path: Path) -> None:
    with Command(tmp_path, store, *QUIET) as command:
        command.wait_for(lambda: command.shared.glob("boost-launch-*"))
        seen: set[str] = set()

        def look() -> bool:
            seen.update(listening(command.processes()))
            return Phase.STEP in command.phases()

        command.wait_for(look)
        look()
        command.process.send_signal(signal.SIGUSR2)
        command.wait_for(lambda: saved_steps(command.run))
        (step,) = saved_steps(command.run)
        command.wait_for(lambda: read_metrics(command.run / "metrics.jsonl")[-1]["step"] > step)
        os.killpg(command.process.pid, signal.SIGINT)
        code, out, err = command.finish()
    assert seen, "gloo listens somewhere"
    assert seen <= {"0100007F", "00000000000000000000000001000000"}, "loopback only"
    assert code == 0, err
    assert err.count("stopping after this step; press Ctrl-C again to abort") == 1
    assert "stopped by SIGINT" in out and "checkpoint saved" in out
    assert len(saved_steps(command.run)) == 2
