import contextlib
import functools
import io
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from rich.console import Console as RichConsole

import boost.train.progress as progress_of
from boost.train import console
from boost.train.checkpoint import Position
from boost.train.console import ConsoleHook
from boost.train.events import EvalMetrics, EvaluationEnd, StepEnd, StepMetrics
from boost.train.progress import progress

EVALUATION = EvalMetrics(120, 4.3210, 75.264, 1.5123, 8192)


def step(number: int) -> StepMetrics:
    return StepMetrics(number, 4.321, 2.9e-3, 0.41, 8100.0, 0.412, int(1.2 * 2**30), number * 256, 2.0)


def test_lines_are_as_documented() -> None:
    assert console.step_line(step(120), 1000, 201.0) == (
        "step   120/1000  loss 4.3210  lr 2.9e-03  norm 0.41  8.1k tok/s  mfu 41.2%  1.3 GB  eta 3:21"
    )
    assert console.step_line(replace(step(7), cross_entropy=3.2), 9, 1.0).startswith(
        "step     7/9  distillation loss 4.3210  cross-entropy 3.2000  lr"
    )
    assert console.evaluation_line(EVALUATION, 1000) == (
        "eval   120/1000  held-out loss 4.3210  perplexity 75.26  bits/byte 1.5123  8.2k tokens"
    )


@contextlib.contextmanager
def started(total: int, first: int = 1, every: int = 10, terminal: RichConsole | None = None) -> Iterator[Any]:
    """The console of a run, after its introduction. Its methods take no trainer."""
    hook: Any
    hook, train = ConsoleHook(terminal), SimpleNamespace(log_every=every, steps=total)
    trainer: Any = SimpleNamespace(config=SimpleNamespace(train=train), position=Position(first - 1, 0))
    with mock.patch.object(console, "_introduction", return_value=[]):
        hook.on_train_start(trainer)
    for name in ("after_step", "on_evaluation", "on_warning"):
        setattr(hook, name, functools.partial(getattr(hook, name), trainer))
    try:
        yield hook
    finally:
        hook.teardown(trainer)


def end(number: int) -> StepEnd:
    return StepEnd(step(number), False, False, False, False)


def test_the_pace_counts_everything_after_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 103.0, 113.0])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    shown = ConsoleHook()
    assert shown._eta(step(11), 100) == 2.0 * 89  # nothing else is known yet than the step's own time
    assert shown._eta(step(12), 100) == 3.0 * 88
    assert shown._eta(step(13), 100) == 13.0 / 2 * 87


@pytest.mark.parametrize(
    ("first", "said"), [(1, ["1/25", "10/25", "20/25", "25/25"]), (14, ["14/25", "20/25", "25/25"])]
)
def test_plain_lines_are_the_first_every_nth_and_the_last_step_evaluations_and_warnings(
    capsys: pytest.CaptureFixture[str], first: int, said: list[str]
) -> None:
    with started(25, first) as shown:
        for number in range(first, 26):
            shown.after_step(end(number))
        shown.on_evaluation(EvaluationEnd(EVALUATION, complete=True))
        shown.on_warning("saved [not markup]\x1b[2J")
    *steps, evaluation, warning = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in steps] == said
    assert (evaluation, warning) == (console.evaluation_line(EVALUATION, 25), "warning: saved [not markup]\\x1b[2J")


def terminal(width: int = 120) -> RichConsole:
    return RichConsole(file=io.StringIO(), force_terminal=True, width=width, color_system=None, _environ={})


def shown_on(rich: RichConsole) -> str:
    assert isinstance(rich.file, io.StringIO)
    return rich.file.getvalue()


def test_the_bar_shows_what_matters_and_lets_lines_pass() -> None:
    rich = terminal()
    with started(1000, 101, terminal=rich) as shown:
        shown.on_warning("a note [not markup] :smile:")
        shown.after_step(end(120))
        shown.on_evaluation(EvaluationEnd(EVALUATION, complete=True))
    text = shown_on(rich)
    assert "a note [not markup] :smile:" in text
    assert console.evaluation_line(EVALUATION, 1000) in text
    bar = text.rsplit("train", 1)[1]
    for part in ("120/1000", "loss 4.3210", "8.1k tok/s", "mfu 41.2%", "1.3 GB", "eta 29:20", "0:00:0"):
        assert part in bar


def test_a_bar_inside_the_training_bar_joins_it_and_leaves_it() -> None:
    with started(10, terminal=terminal()) as shown:
        assert list(progress(["a", "b"], "evaluating")) == ["a", "b"]
        assert [task.description for task in shown._bar.tasks] == ["train"]
        seen = []
        for number in progress(range(3), "evaluating"):
            seen.append(number)
            tasks = {task.description: task for task in shown._bar.tasks}
            assert (tasks["evaluating"].completed, tasks["evaluating"].total) == (number, 3)
        assert seen == [0, 1, 2]
        # One that is left early goes away.
        work = progress(range(3), "evaluating")
        next(work)
        assert len(shown._bar.tasks) == 2
        work.close()  # type: ignore[attr-defined] # what `break` does to a generator
        assert len(shown._bar.tasks) == 1
    assert not progress_of.live_bars


def test_the_terminal_is_given_back_after_an_error() -> None:
    rich = terminal()
    with pytest.raises(ValueError, match="inside"), started(10, terminal=rich):
        raise ValueError("inside")
    assert not progress_of.live_bars
    assert shown_on(rich).endswith("\x1b[?25h")  # the cursor is visible again


def test_progress_without_a_terminal_speaks_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)

    def work(total: int) -> Iterator[int]:
        nonlocal now
        for number in range(total):
            now += 4.0
            yield number

    class SixPieces(list[int]):
        def __iter__(self) -> Iterator[int]:
            return work(len(self))

    assert list(progress(SixPieces(range(6)), "evaluating")) == list(range(6))
    assert capsys.readouterr().err.splitlines() == ["evaluating 3/6  eta 0:12", "evaluating 6/6  eta 0:00"]
    assert list(progress(work(3), "reading")) == [0, 1, 2]
    assert capsys.readouterr().err.splitlines() == ["reading 3"]


def test_short_or_disabled_progress_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(progress(range(5), "short")) == [0, 1, 2, 3, 4]
    assert list(progress(range(2), "other rank", enabled=False)) == [0, 1]
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("width", "total", "parts"),
    [
        (80, 1000, ("loss 4.3210 8.1k tok/s 1.3 GB eta 29:20", "0:00:0")),
        (60, 1_000_000, ("loss 4.3210 8.1k tok/s eta ",)),
    ],
)
def test_a_narrow_terminal_keeps_what_matters_most(width: int, total: int, parts: tuple[str, ...]) -> None:
    rich = terminal(width)
    with started(total, terminal=rich) as shown:
        shown.after_step(end(120))
    bar = shown_on(rich).rsplit("train", 1)[1]
    for part in (f"120/{total}", *parts):
        assert part in bar
    assert "…" not in bar
