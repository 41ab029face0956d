"""Detection of slow replicas."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from boost.elastic import hooks
from boost.elastic.hooks import SlowReplicas, slow_members
from boost.elastic.membership import Decision, Member
from boost.train.heartbeat import Beat

MEMBERS = tuple(Member(replica, f"{replica}.0") for replica in range(3))


def beats(*pace: float) -> list[Beat]:
    return [Beat(rank, 1, incarnation=f"{rank // 2}.0", pace=each) for rank, each in enumerate(pace)]


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
    recovery = SimpleNamespace(
        decision=Decision(0, MEMBERS), beats=lambda: pace, exclude_slow=lambda member, text: gone.append(member)
    )
    trainer: Any = SimpleNamespace(recovery=recovery, warn=warnings.append)
    hook = SlowReplicas(5, exclude)
    for step in range(1, 12):
        if step == 4:
            pace[:] = beats(1, 1, 1, 1, 1, 1)
        if step == 5:
            pace[:] = beats(1, 1, 6, 6, 1, 1)
        hook.after_step(trainer, SimpleNamespace(metrics=SimpleNamespace(step=step)))  # type: ignore[arg-type]
        assert len(warnings) == (step >= 10), "five steps after it was last well"
    action = "it is excluded and restarted" if exclude else "check the load of its machine"
    assert warnings == [f"replica 1 takes 6.0 times as long as the others for 5 steps; {action}"]
    assert gone == ([MEMBERS[1]] if exclude else [])
