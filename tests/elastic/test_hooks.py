"""Detection of slow replicas."""

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from boost.elastic import hooks
from boost.elastic import step as elastic_step
from boost.elastic.hooks import SlowReplicas, slow_members
from boost.elastic.membership import Decision, Member
from boost.elastic.session import Admission
from boost.elastic.step import RecoverableStepper
from boost.errors import LostRunError, StorageError
from boost.parallel.gradients import StepFlags
from boost.train.heartbeat import Beat
from boost.train.run_lock import LOCK_FILE, RunLock

MEMBERS = tuple(Member(replica, f"{replica}.0") for replica in range(3))


def beats(*pace: float) -> list[Beat]:
    return [Beat(rank, 1, incarnation=f"{rank // 2}.0", pace=each) for rank, each in enumerate(pace)]


def test_a_directory_whose_lock_cannot_be_taken_over_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saves must still see that another run has it meanwhile."""

    def fail(lock: RunLock) -> None:
        raise StorageError("no answer")

    monkeypatch.setattr(RunLock, "__enter__", fail)
    monkeypatch.setattr(hooks, "take_terminal", lambda: None)
    run = SimpleNamespace(path=tmp_path, token="ours", lock=None)
    hooks.TakeOver().setup(SimpleNamespace(takes_over=True, run=run))
    (tmp_path / LOCK_FILE).write_text('{"token": "theirs"}')
    with pytest.raises(LostRunError):
        run.lock.require_held()


def test_the_slowest_process_of_a_replica_counts() -> None:
    decision = Decision(0, MEMBERS)
    assert slow_members(decision, beats(1, 1, 1, 1, 1, 1)) == {}
    assert slow_members(decision, beats(1, 1, 1, 6, 1, 1)) == {MEMBERS[1]: 6.0}
    assert slow_members(decision, []) == {}, "unknown is not slow"
    assert slow_members(Decision(0, MEMBERS[:1]), beats(9, 9)) == {}


@pytest.mark.parametrize("exclude", [False, True])
def test_it_is_reported_once_after_enough_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exclude: bool) -> None:
    monkeypatch.setattr(hooks, "LOOK_S", 0.0)
    warnings: list[str] = []
    gone: list[Member] = []
    pace = beats(1, 1, 6, 6, 1, 1)
    trainer: Any = SimpleNamespace(warn=warnings.append)
    decision = Decision(0, MEMBERS)
    hook = SlowReplicas(5, lambda: (decision, pace), (lambda member, text: gone.append(member)) if exclude else None)
    for step in range(1, 12):
        if step == 4:
            pace[:] = beats(1, 1, 1, 1, 1, 1)
        if step == 5:
            pace[:] = beats(1, 1, 6, 6, 1, 1)
        hook.after_step(trainer, SimpleNamespace(metrics=SimpleNamespace(step=step)))  # type: ignore[arg-type]
        assert len(warnings) == (step >= 10), "five steps after it was last well"
    action = "it will be excluded and restarted" if exclude else "check the load on its machine"
    assert warnings == [f"replica 1 has taken 6.0 times as long as the other replicas for 5 steps; {action}"]
    assert gone == ([MEMBERS[1]] if exclude else [])


class Event:
    """A CUDA event that the GPU reaches long after the host has recorded it."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.reached = seconds, False

    def synchronize(self) -> None:
        assert self.reached, "passes must not wait for the GPU"

    def elapsed_time(self, end: "Event") -> float:
        return (end.seconds - self.seconds) * 1e3


def test_the_pace_of_a_gpu_is_that_of_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host launches them in a fraction of the time, on a slow GPU too."""
    events, paces = [Event(10.0), Event(16.0)], list[float]()
    recorded = list(events)
    monkeypatch.setattr(elastic_step, "now", lambda device: recorded.pop(0))
    monkeypatch.setattr(elastic_step, "set_pace", paces.append)
    monkeypatch.setattr(elastic_step, "run_passes", lambda *_, **__: torch.zeros(()))
    stepper: Any = RecoverableStepper.__new__(RecoverableStepper)

    def together(attempt: object) -> list[float]:
        for event in events:
            event.reached = True
        return [0.0, 0.0, 0.0, 0.0]

    facts: dict[str, Any] = {
        "mesh": SimpleNamespace(device=torch.device("cuda"), together=together),
        "reducer": SimpleNamespace(begin=lambda count: None),
        "copies": SimpleNamespace(in_use=contextlib.nullcontext),
        "model": None,
        "config": None,
        "tokens": 1,
    }
    vars(stepper).update(facts)
    passes: Any = SimpleNamespace(loss=stepper._run_passes([], 2), targets=0)
    assert not paces, "the GPU has not finished"
    stepper.reduce(passes, StepFlags.NONE)
    assert paces == [3.0]


def test_replicas_are_admitted_after_a_step_that_neither_ends_the_run_nor_is_rolled_back() -> None:
    admitted, waiting, said = list[int](), [False, True], list[str]()
    recovery: Any = SimpleNamespace(
        has_waiting=lambda: waiting.pop(0), admit=lambda: admitted.append(1), warnings=["the store is silent"]
    )
    trainer: Any = SimpleNamespace(
        requested=StepFlags.SAVE, judge=SimpleNamespace(rollback_reason=None), warn=said.append
    )
    hook = Admission(recovery)
    for requested in (StepFlags.SAVE, StepFlags.SAVE | StepFlags.JOIN):
        hook.after_backward(trainer)
        assert trainer.requested == requested

    def admits(joins: bool = True, last: bool = False, stopping: bool = False) -> bool:
        admitted.clear()
        hook.after_step(trainer, SimpleNamespace(joins=joins, last=last, stopping=stopping))  # type: ignore[arg-type]
        return bool(admitted)

    assert not admits(joins=False) and said == ["the store is silent"]
    assert admits() and not admits(joins=False) and not admits(last=True) and not admits(stopping=True)
    trainer.judge.rollback_reason = "a spike"
    assert not admits(), "the newcomer would not roll back"
