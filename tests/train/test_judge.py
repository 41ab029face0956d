"""What is known of a run's health, and where it rolls back to."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from boost.errors import TrainingError
from boost.parallel.mesh import Mesh
from boost.train.checkpoint import Position
from boost.train.events import RunTrouble
from boost.train.judge import MAX_ROLLBACKS, PAST_TROUBLE, Judge
from tests import toy


def judge_of(proven: Path | None = None) -> Judge:
    stepper: Any = SimpleNamespace(mesh=Mesh(toy.CPU))
    saves: Any = SimpleNamespace(proven=lambda step: proven)
    return Judge(stepper, None, saves)  # type: ignore[arg-type]


def rolled_back(judge: Judge, step: int) -> Path:
    judge.rollback_reason = "a spike"
    reason = judge.begin_rollback(step)
    assert judge.rollback_reason is None, "it is under way"
    return judge.rollback_target(reason)


def test_a_process_that_joins_knows_what_the_others_know() -> None:
    judge, other = judge_of(Path("step-2")), judge_of()
    judge.bad_steps, judge.proven_step, judge.trouble = 2, 7, RunTrouble("diverged at step 8", ruined=True)
    rolled_back(judge, 8)
    other.take_state(json.loads(json.dumps(judge.state())))
    assert other.state() == judge.state()
    assert (other.trouble, other.bad_steps, other.proven_step) == (judge.trouble, 2, 7)
    other.take_state(json.loads(json.dumps(judge_of().state())))
    assert other.state() == judge_of().state() and other.trouble is None


def test_rollbacks_of_one_problem_are_limited() -> None:
    """The problem is over only well past the furthest step that it reached."""
    judge = judge_of(Path("step-2"))
    for _ in range(2):
        for _ in range(MAX_ROLLBACKS):
            assert rolled_back(judge, 9) == Path("step-2")
        with pytest.raises(TrainingError, match="a spike; 3 rollbacks did not help; resume from 'step-2'"):
            rolled_back(judge, 9 + PAST_TROUBLE)
        assert rolled_back(judge, 9 + 2 * PAST_TROUBLE + 1) == Path("step-2"), "another problem"
        judge.rollbacks = judge.furthest = 0


def test_without_a_proven_checkpoint_there_is_no_rollback() -> None:
    with pytest.raises(TrainingError, match="train.on_spike = 'rollback', but there is no proven"):
        rolled_back(judge_of(), 9)


def test_positions_of_checkpoints_are_marked_while_there_is_trouble() -> None:
    judge, position = judge_of(), Position(4, 64)
    assert judge.marked(position) is position
    for ruined in (True, False):
        judge.trouble = RunTrouble("why", ruined)
        marked = judge.marked(position)
        assert (marked.trouble, marked.doubt) == (("why", "") if ruined else ("", "why"))
