"""Hooks: order of events, requests from any process, and the effect of errors in hooks."""

import contextlib
import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch

from boost.errors import TRY_AGAIN, BoostError, ConfigError, StorageError, TrainingError
from boost.parallel.gradients import StepFlags, launch_step_stats
from boost.train import run
from boost.train.builtin_hooks import BadStepLimit, PeriodicCheckpoint, PeriodicEvaluation, ReplicaCheck
from boost.train.checkpoint import Position
from boost.train.console import ConsoleHook
from boost.train.events import SaveEnd, SaveStart, TrainResult
from boost.train.faults import Fault, FaultInjection
from boost.train.health import HealthMonitor
from boost.train.hooks import Hook
from boost.train.loop import Trainer
from boost.train.metrics import MetricsHook
from boost.train.rundir import RunDirectory
from tests import toy
from tests.distributed import run_distributed
from tests.train.commands import saved_steps
from tests.train.runs import EVENTS, Do, Recorder, Warnings, make_config, request_stop, started


class Refuse(Warnings):
    """Refuses checkpoints of some steps on one process."""

    def __init__(self, steps: set[int], rank: int = 0) -> None:
        super().__init__()
        self.steps, self.rank = steps, rank

    def before_save(self, trainer: Trainer, event: SaveStart) -> str | None:
        return "not good enough" if event.step in self.steps and trainer.mesh.rank == self.rank else None


def fit(config: Any, *given: Hook) -> tuple[Trainer, TrainResult]:
    trainer = started(config, *given)
    return trainer, trainer.fit()


def test_the_order_of_events_and_of_hooks(store: Path, tmp_path: Path) -> None:
    """A step is reported, then evaluated, then saved; the last step is saved, then evaluated. Given hooks come before the built-in
    ones."""
    recorder, second = Recorder(), Hook()
    train = {"steps": 3, "eval_every": 2, "save_every": 2, "async_save": False}
    trainer, _ = fit(make_config(store, tmp_path, train=train), recorder, second)
    assert trainer.hooks[:2] == [recorder, second]
    own = [BadStepLimit, ReplicaCheck, HealthMonitor, PeriodicEvaluation, PeriodicCheckpoint]
    assert [type(hook) for hook in trainer.hooks[2:]] == own
    step, save = ["before_step", "after_backward", "after_step"], ["before_save", "after_save"]
    assert recorder.names == [
        *["setup", "on_train_start"],
        *step,
        *[*step, "on_evaluation", *save],
        *[*step, *save, "on_evaluation"],
        *["on_train_end", "teardown"],
    ]


def test_events_say_where_the_run_stands(store: Path, tmp_path: Path) -> None:
    recorder = Recorder()
    config = make_config(store, tmp_path, train={"steps": 2, "eval_every": 1, "eval_tokens": 64})
    trainer, result = fit(config, recorder)
    starts, ends = (recorder.of(name) for name in ("before_step", "after_step"))
    assert recorder.of("on_train_end") == [result]
    assert [e.step for e in starts] == [e.metrics.step for e in ends] == [1, 2]
    assert [e.lr for e in starts] == [e.metrics.lr for e in ends]
    assert [(e.skipped, e.last, e.stopping, e.save_requested) for e in ends] == [
        (False, False, False, False),
        (False, True, False, False),
    ]
    assert [(e.metrics.step, e.complete) for e in recorder.of("on_evaluation")] == [(1, False), (2, True)]
    assert recorder.of("after_save") == [SaveEnd(2, trainer.run.checkpoints / "step-00000002")]
    with pytest.raises(AttributeError, match="cannot assign"):
        starts[0].step = 5


@pytest.mark.parametrize(("event", "last"), [("before_step", 2), ("after_step", 3)])
def test_a_hook_stops_the_run_and_everything_is_saved(store: Path, tmp_path: Path, event: str, last: int) -> None:
    recorder = Recorder()
    trainer, result = fit(make_config(store, tmp_path, train={"eval_every": 1}), Do(event, 2, request_stop), recorder)
    assert (result.position.step, result.stopped_by, result.evaluation) == (last, "the test", None)
    assert not result.by_signal and not result.received_signal
    assert result.checkpoint is not None and saved_steps(trainer.run.path) == [last]
    assert recorder.names.count("on_evaluation") == last - 1, "a step that stops the run is not evaluated"
    assert recorder.names[-2:] == ["on_train_end", "teardown"]


def test_a_stop_asked_for_in_the_last_step_changes_nothing(store: Path, tmp_path: Path) -> None:
    _, result = fit(make_config(store, tmp_path), Do("before_step", 6, request_stop))
    assert (result.position.step, result.stopped_by) == (6, None)
    assert result.evaluation is not None


def stop_on_one(config: Any) -> tuple[int, str | None, bool]:
    _, result = fit(config, Do("after_step", 2, request_stop, rank=1))
    assert result.checkpoint is not None
    return result.position.step, result.stopped_by, result.by_signal


def test_a_stop_asked_for_on_one_process_stops_all_after_the_same_step(store: Path, tmp_path: Path) -> None:
    config = make_config(store, tmp_path, 2, train={"steps": 50})
    assert run_distributed(2, stop_on_one, config) == [(3, "a hook on another process", False), (3, "the test", False)]


def test_a_stop_by_a_hook_exits_with_0_on_every_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    position = Position(3, 384)
    assert run._exit_code(TrainResult(position, None, None, "a hook on another process")) == 0
    elsewhere = TrainResult(position, None, None, "a signal to another process", by_signal=True)
    assert run._exit_code(elsewhere) == TRY_AGAIN


def request_and_refuse_on_one(config: Any) -> tuple[list[int], list[str], Any]:
    refuse, recorder = Refuse({5, 6}, rank=1), Recorder()
    trainer, result = fit(config, Do("after_step", 2, Trainer.request_save, rank=1), refuse, recorder)
    assert recorder.names.count("before_save") == 3 and recorder.names.count("after_save") == 1
    return saved_steps(trainer.run.path), refuse.seen, result.checkpoint and result.checkpoint.name


@pytest.mark.slow
def test_a_save_that_one_process_asks_for_or_refuses_happens_on_all_or_none(store: Path, tmp_path: Path) -> None:
    """Not even the last one is saved if it is refused; the run still ends with its evaluation and the earlier checkpoint."""
    config = make_config(store, tmp_path, 2, train={"save_every": 5, "keep": 9})
    for steps, warnings, latest in run_distributed(2, request_and_refuse_on_one, config):
        assert steps == [3], "once, after the step that follows the request"
        assert latest == "step-00000003"
        said = [each for each in warnings if "training waited" not in each]  # what a slow disk is told
        assert said == [f"the checkpoint for step {step} was not saved: not good enough" for step in (5, 6)]


def test_a_refused_checkpoint_is_not_called_saved(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(store, tmp_path)
    for refused, words in ((set(), "checkpoint saved"), ({2}, "a hook refused this step's checkpoint")):
        trainer, result = fit(config, Do("before_step", 2, request_stop), Refuse(refused))
        run._print_result(config, trainer, result)
        assert f"stopped by the test at step 2 of 6, {words}; resume with --resume auto" in capsys.readouterr().out
        for path in trainer.run.checkpoints.glob("step-*"):
            path.rename(path.with_name(f"superseded-{path.name}"))


def raise_on_save(config: Any) -> tuple[str, list[int]]:
    def fail(_: Trainer) -> None:
        raise StorageError("no quota left")

    trainer = started(config, Do("before_save", 0, fail, rank=1))
    with pytest.raises(TrainingError) as error:
        trainer.save()
    return str(error.value), saved_steps(trainer.run.path)


def test_an_error_before_a_save_is_raised_on_all_processes(store: Path, tmp_path: Path) -> None:
    assert run_distributed(2, raise_on_save, make_config(store, tmp_path, 2)) == [("no quota left", [])] * 2


@pytest.mark.parametrize(
    "event",
    [name for name in EVENTS if name not in ("on_bad_step", "on_rollback", "on_event", "on_warning", "teardown")],
)
def test_a_hook_that_raises_ends_the_run(store: Path, tmp_path: Path, event: str) -> None:
    """Later hooks do not see the event; all hooks are torn down."""

    def fail(*_: Any) -> None:
        raise ZeroDivisionError(event)

    broken, after = Hook(), Recorder()
    setattr(broken, event, fail)
    # getattr(hook, name) finds the instance's attribute, as a method of a subclass would be found.
    trainer = started(make_config(store, tmp_path, train={"steps": 1, "sample_tokens": 2}), broken, after)
    with pytest.raises(ZeroDivisionError, match=event):
        trainer.fit()
    assert event not in after.names
    assert after.names.count("teardown") == 1 and after.names[-1] == "teardown"
    assert "on_train_end" not in after.names


def test_an_error_in_teardown_is_logged_and_costs_no_other_hook(
    store: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Hook):
        def teardown(self, trainer: Trainer) -> None:
            raise ZeroDivisionError

    recorder = Recorder()
    with caplog.at_level("ERROR", logger="boost"):
        _, result = fit(make_config(store, tmp_path, train={"steps": 1}), Broken(), recorder)
    assert result.position.step == 1
    assert recorder.names[-1] == "teardown"
    assert "teardown of Broken failed" in caplog.text


def collective_from_main(config: Any) -> str | None:
    """The error of a hook that saves on the main process only; both processes stop before an unmatched collective."""

    class Save(Hook):
        main_only = True

        def on_train_start(self, trainer: Trainer) -> None:
            trainer.save()

    class Leave(Hook):
        def on_train_start(self, trainer: Trainer) -> None:
            raise BoostError("the other process has raised")

    trainer = started(config, Save(), Leave())
    with pytest.raises((RuntimeError, BoostError)) as error:
        trainer.fit()
    return str(error.value) if trainer.mesh.is_main else None


def test_a_main_only_hook_cannot_call_a_collective_method(store: Path, tmp_path: Path) -> None:
    message, _ = run_distributed(2, collective_from_main, make_config(store, tmp_path, 2))
    assert "Save runs on the main process only, but Trainer.save" in message


def printed(config: Any) -> tuple[str, str, list[str], list[str]]:
    """Standard output of a run, what is in its metrics, and events of hooks on all processes and on the main one."""
    out, everywhere, main = io.StringIO(), Recorder(), Recorder()
    main.main_only = True  # type: ignore[misc]
    with contextlib.redirect_stdout(out):
        fit(config, ConsoleHook(), MetricsHook(), everywhere, main)
    return out.getvalue(), RunDirectory(config.run.dir).metrics.read_text(), everywhere.names, main.names


@pytest.mark.slow
def test_main_only_hooks_and_so_console_and_metrics_run_on_the_main_process_only(store: Path, tmp_path: Path) -> None:
    config = make_config(store, tmp_path, 2, train={"eval_every": 3, "log_every": 1})
    RunDirectory.create(config, resume=False)
    (said, metrics, all_0, main_0), (silence, _, all_1, main_1) = run_distributed(2, printed, config)
    assert all_0 == all_1 == main_0
    assert main_1 == [] and silence == ""
    first, *lines = said.splitlines()
    assert "layout btp, tp 2 x pp 1 x dp 1 on cpu" in first
    assert [line.split()[:2] for line in lines] == [
        *[["step", f"{step}/6"] for step in (1, 2, 3)],
        *[["eval", "3/6"]],
        *[["step", f"{step}/6"] for step in (4, 5, 6)],
        *[["eval", "6/6"]],
    ]
    assert metrics.count('"kind": "step"') == 6 and metrics.count('"kind": "eval"') == 2


def test_hooks_of_modules_that_no_step_calls_are_refused(store: Path, tmp_path: Path) -> None:
    calls: list[str] = []

    def attach(name: str, kind: str = "register_forward_hook") -> Do:
        def action(trainer: Trainer) -> None:
            getattr(trainer.model.get_submodule(name), kind)(lambda *_: calls.append(name))

        return Do("on_train_start", 0, action)

    fit(make_config(store, tmp_path / "0"), attach("blocks.0"), attach("", "register_full_backward_hook"))
    assert set(calls) == {"", "blocks.0"}
    for number, (name, *kind) in enumerate(
        (("blocks.0.qkv",), ("blocks",), ("blocks.0", "register_full_backward_hook")), 1
    ):
        with pytest.raises(ConfigError, match=f"hooks of '{name}' would not be called"):
            fit(make_config(store, tmp_path / str(number)), attach(name, *kind))


def test_methods_that_are_named_like_events_are_reported() -> None:
    with pytest.warns(UserWarning, match=r"no run calls Watch\.on_step_end"):

        class Watch(Hook):
            def on_step_end(self) -> None: ...


def assign(trainer: Trainer) -> None:
    trainer.model.load_state_dict(
        {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}, assign=True
    )


def average(trainer: Trainer) -> None:
    trainer.model.average = copy.deepcopy(trainer.model).requires_grad_(False)  # type: ignore[assignment]


def add(trainer: Trainer) -> None:
    trainer.model.register_parameter("scale", torch.nn.Parameter(torch.ones(3)))


@pytest.mark.parametrize(
    ("action", "said"),
    [(assign, "replaced or added the parameter 'embed'"), (add, "replaced or added the parameter 'scale'")],
)
def test_parameters_that_no_step_trains_are_refused(action: Any, said: str, store: Path, tmp_path: Path) -> None:
    for number, event in enumerate((("on_train_start", 0), ("after_step", 2))):
        with pytest.raises(ConfigError, match=said):
            fit(make_config(store, tmp_path / str(number)), Do(*event, action))
        assert not list((tmp_path / str(number)).glob("checkpoints/*"))
    fit(make_config(store, tmp_path / "frozen"), Do("on_train_start", 0, average))


def test_bad_steps_are_counted_in_a_row_and_seen_before_the_limit_ends_the_run(store: Path, tmp_path: Path) -> None:
    recorder, nans = Recorder(), FaultInjection([Fault("nan", number) for number in (1, 3, 4, 5)])
    with pytest.raises(TrainingError, match="at step 5: not finite for 3 steps in a row"):
        fit(make_config(store, tmp_path), recorder, nans)
    assert [(e.step, e.consecutive) for e in recorder.of("on_bad_step")] == [(1, 1), (3, 1), (4, 2), (5, 3)]
    assert [e.skipped for e in recorder.of("after_step")] == [True, False, True, True]


def flags_of(raised: list[tuple[int, int]]) -> list[int]:
    """The flags that both processes read, for each pair that they set."""
    mesh = toy.mesh(tp=2)
    loss = torch.zeros((), dtype=torch.double)
    own = [StepFlags(pair[mesh.rank]) for pair in raised]
    return [launch_step_stats([], loss, 1, 1, mesh, flags).read().flags.value for flags in own]


def test_flags_of_all_processes_are_united() -> None:
    raised = [(0, 0), (0, 1), (2, 2), (4, 1), (7, 7)]
    assert run_distributed(2, flags_of, raised) == [[first | second for first, second in raised]] * 2
